// Linear layers with 4-, 8- or 16-bit weights for CPUs: x [.., K] float32 to [.., N] float32.
//
// A weight is d * q + m: q unsigned, d and m float16, one pair for each output and GROUP inputs (with 8
// bits m is -128 d and not stored). So a group's sum is d * sum(q x) + m * sum(x), in float32 throughout.
//
// weight [N / BLOCK, K / DEPTH, BLOCK] int32: a word holds DEPTH = 32 / BITS inputs of one output.
// scales [N / BLOCK, K / GROUP, 1 or 2, BLOCK] float16: d, and m where it is stored. N and K are padded.
// With 16 bits a weight is a float16 itself: weight's words are [N / BLOCK, K, BLOCK] of them, and scales
// [N / BLOCK, K / GROUP, 0].
//
// Every row is summed in the same order, however many rows a call has: a row's result never depends on
// the rows beside it.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>

#include <immintrin.h>

namespace {

constexpr int GROUP = 32;  // inputs that share a scale
constexpr int BLOCK = 32;  // outputs stored side by side
constexpr int LINE = 16;   // words of a cache line
constexpr int AHEAD = 1024;  // words between those read and those asked for: 4 KiB
#ifdef __AVX512F__
constexpr int LANES = 16;  // of a vector
constexpr int ROWS = 8;    // most rows of a tile: their sums of a group stay in registers
#else
constexpr int LANES = 8;
constexpr int ROWS = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

inline Words load(const int32_t* p) {
  Words v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

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

// Rows of activations as the tiles want them: [groups, R, ...] for each tile of R rows.
template <int BITS>
struct Inputs {
  int64_t groups;
  std::unique_ptr<float[]> scaled;  // [groups, R, GROUP], input j of a word times 2^-shift(j)
  std::unique_ptr<float[]> sums;    // [groups, R]

  // x is [M, K], and zeros where K ends within a group.
  Inputs(const float* x, int64_t M, int64_t K, int64_t groups)
      : groups(groups), scaled(new float[M * groups * GROUP]), sums(new float[M * groups]) {
    float scale[GROUP];
    for (int k = 0; k < GROUP; ++k) scale[k] = 1.0f / (1 << shift<BITS>(k % (32 / BITS)));
    for (int64_t first = 0, R; first < M; first += R) {
      R = next_rows(M - first);
      for (int64_t r = 0; r < R; ++r)
        for (int64_t g = 0; g < groups; ++g) {
          const float* group = x + (first + r) * K + g * GROUP;
          float padded[GROUP] = {};
          if (K < (g + 1) * GROUP) {
            std::copy_n(group, K - g * GROUP, padded);
            group = padded;
          }
          const int64_t at = first * groups + g * R + r;
          Floats sum = {};
          for (int k = 0; k < GROUP; k += LANES) {
            sum += load(group + k);
            store(scaled.get() + at * GROUP + k, load(group + k) * load(scale + k));
          }
          sums[at] = 0;
          for (int i = 0; i < LANES; ++i) sums[at] += sum[i];
        }
    }
  }
};

// R rows times V vectors of outputs of a block, from start on.
template <int BITS, int R, int V>
void tile(const float* x, const float* sums, int64_t groups, const int32_t* w, const at::Half* s,
          int start, Floats (&total)[R][V]) {
  constexpr int DEPTH = 32 / BITS;
  for (int64_t g = 0; g < groups; ++g, x += R * GROUP, sums += R) {
    Floats part[R][V] = {};
#pragma GCC unroll 8
    for (int c = 0; c < GROUP / DEPTH; ++c, w += BLOCK) {
      for (int i = 0; i < V * LANES; i += LINE) __builtin_prefetch(w + AHEAD + start + i);
#pragma GCC unroll 8
      for (int j = 0; j < DEPTH; ++j) {
        Floats q[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) q[v] = cut<BITS>(w, start + v * LANES, j);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) part[r][v] += q[v] * x[r * GROUP + c * DEPTH + j];
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const at::Half* pair = s + start + v * LANES;
      const Floats d = BITS < 16 ? load(pair) : Floats{}, m = BITS == 4 ? load(pair + BLOCK) : d * -128.0f;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        if (BITS == 16) {
          total[r][v] += part[r][v];
        } else {  // one rounding each, whatever R is
          total[r][v] += d * part[r][v];
          total[r][v] += m * sums[r];
        }
      }
    }
    s += (BITS == 4 ? 2 : BITS == 8 ? 1 : 0) * BLOCK;
  }
}

// R rows times one block of outputs, of which those from N on are padding.
template <int BITS, int R, int V>
void rows(const float* x, const float* sums, int64_t groups, const int32_t* w, const at::Half* s,
          const float* bias, float* out, int64_t first, int64_t N) {
  for (int start = 0; start < BLOCK; start += V * LANES) {
    Floats total[R][V] = {};
    tile<BITS, R, V>(x, sums, groups, w, s, start, total);
    for (int v = 0; v < V; ++v) {
      const int64_t n = first + start + v * LANES, count = std::min<int64_t>(LANES, N - n);
      if (count <= 0) return;
      float offset[LANES] = {};
      if (bias) std::copy_n(bias + n, count, offset);
      for (int r = 0; r < R; ++r) {
        const Floats sum = total[r][v] + load(offset);
        if (count == LANES)
          store(out + r * N + n, sum);
        else
          for (int i = 0; i < count; ++i) out[r * N + n + i] = sum[i];
      }
    }
  }
}

template <int BITS>
void multiply(const float* x, int64_t M, int64_t inputs, const at::Tensor& weight,
              const at::Tensor& scales, const float* bias, float* out, int64_t N) {
  const int64_t groups = scales.size(1), w_step = weight.stride(0), s_step = scales.stride(0);
  const Inputs<BITS> in(x, M, inputs, groups);
  const int32_t* w = weight.const_data_ptr<int32_t>();
  const at::Half* s = scales.const_data_ptr<at::Half>();
  // A thread gets at least 32k words, fewer with more rows, or starting it costs more than it saves.
  const int64_t grain = std::max<int64_t>(1, 32768 / (w_step * std::min<int64_t>(M, 4)));
  at::parallel_for(0, weight.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      for (int64_t r = 0, R; r < M; r += R) {
        R = next_rows(M - r);
        const auto run = [&](auto kernel) {
          kernel(in.scaled.get() + r * groups * GROUP, in.sums.get() + r * groups, groups,
                 w + b * w_step, s + b * s_step, bias, out + r * N, b * BLOCK, N);
        };
        switch (R) {
          case 1: run(rows<BITS, 1, BLOCK / LANES>); break;
          case 2: run(rows<BITS, 2, BLOCK / LANES>); break;
          case 3: run(rows<BITS, 3, 2>); break;
          case 4: run(rows<BITS, 4, 2>); break;
#ifdef __AVX512F__
          case 5: run(rows<BITS, 5, 2>); break;
          case 6: run(rows<BITS, 6, 2>); break;
          case 7: run(rows<BITS, 7, 2>); break;
          case 8: run(rows<BITS, 8, 2>); break;
#endif
        }
      }
  });
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                  const std::optional<at::Tensor>& bias, int64_t bits, int64_t outputs) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "quantised layers take float32 inputs");
  const at::Tensor in = x.contiguous();
  const int64_t K = in.size(-1), M = in.numel() / K;
  auto shape = in.sizes().vec();
  shape.back() = outputs;
  at::Tensor out = at::empty(shape, in.options());
  const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
  const auto run = bits == 4 ? multiply<4> : bits == 8 ? multiply<8> : multiply<16>;
  run(in.const_data_ptr<float>(), M, K, weight, scales, b, out.mutable_data_ptr<float>(), outputs);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(multirate, m) {
  m.def("quantized_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int bits, int outputs)"
        " -> Tensor");
  m.impl("quantized_linear", c10::DispatchKey::CPU, linear);
}
