// Linear layers with 4- or 8-bit weights for CPUs: x [.., K] float32 to [.., N] float32.
//
// A weight is d * q + m: q unsigned, d and m float16, one pair for each output and GROUP inputs (with 8
// bits m is -128 d and not stored). So a group's sum is d * sum(q x) + m * sum(x), in float32 throughout.
//
// weight [N / BLOCK, K / DEPTH, BLOCK] int32: a word holds DEPTH = 32 / BITS inputs of one output.
// scales [N / BLOCK, K / GROUP, 1 or 2, BLOCK] float16: d, and m where it is stored. N and K are padded.
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
#include <optional>
#include <vector>

#include <immintrin.h>

namespace {

constexpr int GROUP = 32;  // inputs that share a scale
constexpr int BLOCK = 32;  // outputs stored side by side
constexpr int LANES = 8;   // of a vector
constexpr int ROWS = 4;    // most rows that a tile holds in registers

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

inline Floats load(const at::Half* p) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Number j of a word is cut out where it stands, as q * 2^shift, and multiplied with x * 2^-shift, which
// is exact and saves a shift for every number. The last one would reach the sign bit, so it is shifted.
template <int BITS>
constexpr int shift(int j) {
  return BITS * std::min(j, 32 / BITS - 2);
}

// Rows of activations as the tiles want them.
template <int BITS>
struct Inputs {
  int64_t K, groups;
  std::vector<float> scaled;  // [M, K] padded with zeros, input j of a word times 2^-shift(j)
  std::vector<float> sums;    // [M, groups]

  Inputs(const float* x, int64_t M, int64_t inputs, int64_t padded)
      : K(padded), groups(padded / GROUP), scaled(M * padded), sums(M * groups) {
    float scale[GROUP];
    for (int k = 0; k < GROUP; ++k) scale[k] = 1.0f / (1 << shift<BITS>(k % (32 / BITS)));
    for (int64_t r = 0; r < M; ++r) std::copy_n(x + r * inputs, inputs, scaled.data() + r * K);
    for (int64_t g = 0; g < M * groups; ++g) {
      float* group = scaled.data() + g * GROUP;
      Floats sum = {};
      for (int k = 0; k < GROUP; k += LANES) sum += load(group + k);
      for (int i = 0; i < LANES; ++i) sums[g] += sum[i];
      for (int k = 0; k < GROUP; ++k) group[k] *= scale[k];
    }
  }
};

// R rows times V vectors of outputs.
template <int BITS, int R, int V>
void tile(const float* x, const float* sums, int64_t K, const int32_t* w, const at::Half* s,
          Floats (&total)[R][V]) {
  constexpr int DEPTH = 32 / BITS, MASK = (1 << BITS) - 1;
  const int64_t groups = K / GROUP;
  for (int64_t g = 0; g < groups; ++g) {
    Floats part[R][V] = {};
    for (int c = 0; c < GROUP / DEPTH; ++c, w += BLOCK, x += DEPTH) {
#pragma GCC unroll 8
      for (int j = 0; j < DEPTH; ++j) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          Words word = load(w + v * LANES);
          if (j == DEPTH - 1) word >>= BITS;
          const Ints q = (Ints)(word & (uint32_t(MASK) << shift<BITS>(j)));
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r)
            part[r][v] += __builtin_convertvector(q, Floats) * x[r * K + j];
        }
      }
    }
    for (int v = 0; v < V; ++v, s += LANES) {
      const Floats d = load(s), m = BITS == 4 ? load(s + BLOCK) : d * -128.0f;
      for (int r = 0; r < R; ++r) total[r][v] += d * part[r][v] + m * sums[r * groups + g];
    }
    s += (BITS == 4 ? 2 : 1) * BLOCK - V * LANES;
  }
}

// R rows times one block of outputs, of which those from N on are padding.
template <int BITS, int R, int V>
void rows(const float* x, const float* sums, int64_t K, const int32_t* w, const at::Half* s,
          const float* bias, float* out, int64_t first, int64_t N) {
  for (int start = 0; start < BLOCK; start += V * LANES) {
    Floats total[R][V] = {};
    tile<BITS, R, V>(x, sums, K, w + start, s + start, total);
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < V * LANES; ++i) {
        const int64_t n = first + start + i;
        if (n < N) out[r * N + n] = total[r][i / LANES][i % LANES] + (bias ? bias[n] : 0.0f);
      }
  }
}

template <int BITS>
void multiply(const float* x, int64_t M, int64_t inputs, const at::Tensor& weight,
              const at::Tensor& scales, const float* bias, float* out, int64_t N) {
  const Inputs<BITS> in(x, M, inputs, weight.size(1) * (32 / BITS));
  const int64_t K = in.K, w_step = weight.stride(0), s_step = scales.stride(0);
  const int32_t* w = weight.const_data_ptr<int32_t>();
  const at::Half* s = scales.const_data_ptr<at::Half>();
  // A thread gets at least 32k words, or starting it costs more than it saves.
  const int64_t grain = std::max<int64_t>(1, 32768 / w_step);
  at::parallel_for(0, weight.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      for (int64_t r = 0; r < M; r += ROWS) {
        const auto run = [&](auto kernel) {
          kernel(in.scaled.data() + r * K, in.sums.data() + r * in.groups, K, w + b * w_step,
                 s + b * s_step, bias, out + r * N, b * BLOCK, N);
        };
        // As many sums at once as registers hold, and enough to hide the latency of each.
        switch (std::min<int64_t>(ROWS, M - r)) {
          case 1: run(rows<BITS, 1, 4>); break;
          case 2: run(rows<BITS, 2, 4>); break;
          case 3: run(rows<BITS, 3, 2>); break;
          default: run(rows<BITS, 4, 2>);
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
  const auto run = bits == 4 ? multiply<4> : multiply<8>;
  run(in.const_data_ptr<float>(), M, K, weight, scales, b, out.mutable_data_ptr<float>(), outputs);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(multirate, m) {
  m.def("quantized_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int bits, int outputs)"
        " -> Tensor");
  m.impl("quantized_linear", c10::DispatchKey::CPU, linear);
}
