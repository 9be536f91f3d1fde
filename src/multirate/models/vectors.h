// Vectors as wide as the CPU's, of the same operators everywhere.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;  // of a vector
#else
constexpr int LANES = 8;
#endif
constexpr int LINE = 16;  // floats, or words, of a cache line

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

}  // namespace
