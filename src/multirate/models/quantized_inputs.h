// Weights of 4, 8 or 16 bits, and the rows of inputs that they are multiplied with; as quantized.cpp says.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include <immintrin.h>

#include "vectors.h"

namespace {

constexpr int GROUP = 32;  // inputs that share a scale
constexpr int BLOCK = 32;  // outputs stored side by side
// Words between those read and those asked for: 64 KiB for the second level of caches, 2 KiB for the first,
// and 4 KiB past the caches.
constexpr int FAR = 16384, NEAR = 512, AHEAD = 1024;
// Most rows of a tile: their sums of a group, in two vectors of outputs each, stay in registers.
#ifdef __AVX512F__
constexpr int ROWS = 14;
#else
constexpr int ROWS = 4;
#endif

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

inline Words load(const int32_t* p) {
  Words v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Asks for words that will be read soon, and for as many that will be later: a core has too few requests
// to its first cache in flight to read memory as fast as it can be read.
inline void ask_for(const int32_t* words, int count, bool streamed) {
  for (int i = 0; i < count; i += LINE) {
    if (streamed) {
      __builtin_prefetch(words + AHEAD + i, 0, 0);
    } else {
      __builtin_prefetch(words + FAR + i, 0, 2);
      __builtin_prefetch(words + NEAR + i);
    }
  }
}

inline Floats load(const at::Half* p) {
#ifdef __AVX512F__
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
}

// Number j of a word is cut out where it stands, as q * 2^shift, and multiplied with x * 2^-shift, which
// is exact and saves a shift for every number. The last one would reach the sign bit: it is shifted down.
template <int BITS>
constexpr int shift(int j) {
  return BITS < 16 && j < 32 / BITS - 1 ? BITS * j : 0;
}

// Weights of input j of a row of words, before scales: of LANES outputs from n on.
template <int BITS>
inline Floats cut(const int32_t* words, int n, int j) {
  if constexpr (BITS == 16) {
    return load(reinterpret_cast<const at::Half*>(words) + j * BLOCK + n);
  } else {
    constexpr uint32_t MASK = (1u << BITS) - 1;
    Words word = load(words + n);
    word = j == 32 / BITS - 1 ? word >> (32 - BITS) : word & (MASK << shift<BITS>(j));
    return __builtin_convertvector((Ints)word, Floats);
  }
}

// How many of the rows left the next tile takes: tiles of like size.
inline int64_t next_rows(int64_t left) {
  const int64_t tiles = (left + ROWS - 1) / ROWS;
  return (left + tiles - 1) / tiles;
}

// Hands over every group of inputs of x [M, K] with its place in [groups, R] of its tile of R rows, the
// tiles one after another. Inputs are zeros where K ends within a group.
template <class Take>
void each_group(const float* x, int64_t M, int64_t K, int64_t groups, const Take& take) {
  at::parallel_for(0, groups, std::max<int64_t>(1, 1024 / M), [&](int64_t begin, int64_t end) {
    for (int64_t first = 0, R; first < M; first += R) {
      R = next_rows(M - first);
      for (int64_t r = 0; r < R; ++r)
        for (int64_t g = begin; g < end; ++g) {
          const float* group = x + (first + r) * K + g * GROUP;
          float padded[GROUP] = {};
          if (K < (g + 1) * GROUP) {
            std::copy_n(group, K - g * GROUP, padded);
            group = padded;
          }
          take(group, first * groups + g * R + r);
        }
    }
  });
}

// Rows of inputs as float32.
template <int BITS>
struct FloatInputs {
  int64_t groups;
  std::unique_ptr<float[]> scaled;  // [groups, R, GROUP] of each tile: input j of a word, * 2^-shift(j)
  std::unique_ptr<float[]> sums;    // [groups, R]

  FloatInputs(const float* x, int64_t M, int64_t K, int64_t groups)
      : groups(groups), scaled(new float[M * groups * GROUP]), sums(new float[M * groups]) {
    float scale[GROUP];
    for (int k = 0; k < GROUP; ++k) scale[k] = 1.0f / (1 << shift<BITS>(k % (32 / BITS)));
    each_group(x, M, K, groups, [&](const float* group, int64_t at) {
      Floats sum = {};
      for (int k = 0; k < GROUP; k += LANES) {
        sum += load(group + k);
        store(scaled.get() + at * GROUP + k, load(group + k) * load(scale + k));
      }
      sums[at] = 0;
      for (int i = 0; i < LANES; ++i) sums[at] += sum[i];
    });
  }

  // R rows, from the first on, times V vectors of outputs of a block, from start on.
  template <int R, int V>
  void tile(int64_t first, const int32_t* w, const at::Half* s, int start, bool streamed,
            Floats (&total)[R][V]) const {
    constexpr int DEPTH = 32 / BITS;
    const float* x = scaled.get() + first * groups * GROUP;
    const float* sum = sums.get() + first * groups;
    for (int64_t g = 0; g < groups; ++g, x += R * GROUP, sum += R) {
      Floats part[R][V] = {};
#pragma GCC unroll 8
      for (int c = 0; c < GROUP / DEPTH; ++c, w += BLOCK) {
        ask_for(w + start, V * LANES, streamed);
#pragma GCC unroll 8
        for (int j = 0; j < DEPTH; ++j) {
          Floats q[V];
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) q[v] = cut<BITS>(w, start + v * LANES, j);
#pragma GCC unroll 14
          for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) part[r][v] += q[v] * x[r * GROUP + c * DEPTH + j];
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const at::Half* pair = s + start + v * LANES;
        const Floats d = BITS < 16 ? load(pair) : Floats{}, m = BITS == 4 ? load(pair + BLOCK) : d * -128.0f;
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
          if (BITS == 16) {
            total[r][v] += part[r][v];
          } else {  // one rounding each, whatever R is
            total[r][v] += d * part[r][v];
            total[r][v] += m * sum[r];
          }
        }
      }
      s += (BITS == 4 ? 2 : BITS == 8 ? 1 : 0) * BLOCK;
    }
  }
};

#ifdef __AVX512VNNI__
// Rows of inputs as 16-bit numbers v with one step for GROUP inputs of a row, x = step * v, which halves the
// multiplications: two a lane. A group's products are summed exactly: 32 * 255 * 32767 is an int32.
template <int BITS>
struct ShortInputs {
  static constexpr int DEPTH = 32 / BITS;
  // With 8 bits q - 128 is what is multiplied: sums start from -128 sum(v), and m needs no term.
  using Sum = std::conditional_t<BITS == 4, float, int32_t>;

  int64_t groups;
  std::unique_ptr<int16_t[]> values;  // [groups, R, GROUP] of each tile; inputs paired as in a word
  std::unique_ptr<float[]> steps;     // [groups, R]
  std::unique_ptr<Sum[]> sums;        // [groups, R]: step * sum(v), or -128 sum(v)

  ShortInputs(const float* x, int64_t M, int64_t K, int64_t groups)
      : groups(groups),
        values(new int16_t[M * groups * GROUP]),
        steps(new float[M * groups]),
        sums(new Sum[M * groups]) {
    // Halves of a word are multiplied at once: its input j lies beside j + DEPTH / 2.
    const __m128i pairs = BITS == 4 ? _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
                                    : _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    const __m512i order = _mm512_broadcast_i32x4(pairs);
    each_group(x, M, K, groups, [&](const float* group, int64_t at) {
      const __m512 a = _mm512_loadu_ps(group), b = _mm512_loadu_ps(group + LANES);
      // As integers, magnitudes compare alike, and a NaN is the largest.
      const int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32(
          _mm512_castps_si512(_mm512_abs_ps(a)), _mm512_castps_si512(_mm512_abs_ps(b))));
      float largest;
      std::memcpy(&largest, &bits, sizeof largest);
      // Infinite and NaN steps reach the results. What is too small to divide by counts as zero.
      const __m512 inverse = _mm512_set1_ps(largest > 1e-30f ? 32767 / largest : 0);
      const __m512i low = _mm512_cvtps_epi32(a * inverse), high = _mm512_cvtps_epi32(b * inverse);
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)),
                                              _mm512_cvtepi32_epi16(high), 1);
      _mm512_storeu_si512(values.get() + at * GROUP, _mm512_shuffle_epi8(both, order));
      steps[at] = largest / 32767;
      const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
      if constexpr (BITS == 4)
        sums[at] = steps[at] * sum;
      else
        sums[at] = -128 * sum;
    });
  }

  // R rows, from the first on, times V vectors of outputs of a block, from start on.
  template <int R, int V>
  void tile(int64_t first, const int32_t* w, const at::Half* s, int start, bool streamed,
            Floats (&total)[R][V]) const {
    const __m512i mask = _mm512_set1_epi16((1 << BITS) - 1);
    const int16_t* x = values.get() + first * groups * GROUP;
    const float* step = steps.get() + first * groups;
    const Sum* sum = sums.get() + first * groups;
    for (int64_t g = 0; g < groups; ++g, x += R * GROUP, step += R, sum += R) {
      __m512i part[R][V];
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v)
          part[r][v] = BITS == 4 ? _mm512_setzero_si512() : _mm512_set1_epi32(sum[r]);
#pragma GCC unroll 8
      for (int c = 0; c < GROUP / DEPTH; ++c, w += BLOCK) {
        ask_for(w + start, V * LANES, streamed);
#pragma GCC unroll 4
        for (int j = 0; j < DEPTH / 2; ++j) {
          __m512i q[V];
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) {
            q[v] = _mm512_srli_epi16(_mm512_loadu_si512(w + start + v * LANES), BITS * j);
            if (j < DEPTH / 2 - 1) q[v] = _mm512_and_si512(q[v], mask);
          }
#pragma GCC unroll 14
          for (int r = 0; r < R; ++r) {
            int32_t pair;
            std::memcpy(&pair, x + r * GROUP + c * DEPTH + 2 * j, sizeof pair);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v)
              part[r][v] = _mm512_dpwssd_epi32(part[r][v], q[v], _mm512_set1_epi32(pair));
          }
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        const Floats d = load(s + start + v * LANES);
        const Floats m = BITS == 4 ? load(s + BLOCK + start + v * LANES) : Floats{};
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {  // one rounding each, whatever R is
          total[r][v] += d * step[r] * (Floats)_mm512_cvtepi32_ps(part[r][v]);
          if constexpr (BITS == 4) total[r][v] += m * sum[r];
        }
      }
      s += (BITS == 4 ? 2 : 1) * BLOCK;
    }
  }
};

template <int BITS>
using Inputs = std::conditional_t<BITS == 16, FloatInputs<BITS>, ShortInputs<BITS>>;
#else
template <int BITS>
using Inputs = FloatInputs<BITS>;
#endif

}  // namespace
