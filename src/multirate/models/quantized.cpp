// Linear layers with 4-, 8- or 16-bit weights for CPUs: x [.., K] float32 to [.., N] float32.
//
// A weight is d * q + m: q unsigned, d and m float16, one pair for each output and GROUP inputs (with 8
// bits m is -128 d and not stored). So a group's sum is d * sum(q x) + m * sum(x).
//
// With AVX512-VNNI, 4 and 8 bits are multiplied with inputs rounded to 16 bits (ShortInputs): an error of
// 2e-5 to 4e-5 of the result where bfloat16 inputs make one of 1.7e-3. Anything else is float32 throughout.
//
// weight [N / BLOCK, K / DEPTH, BLOCK] int32: a word holds DEPTH = 32 / BITS inputs of one output.
// scales [N / BLOCK, K / GROUP, 1 or 2, BLOCK] float16: d, and m where it is stored. N and K are padded.
// With 16 bits a weight is a float16 itself: weight's words are [N / BLOCK, K, BLOCK] of them, and scales
// [N / BLOCK, K / GROUP, 0].
//
// Weights that are read once a pass, and are more than caches hold, are `streamed`: they are asked for in a
// way that leaves the caches to others, a drafter's weights first of all.
//
// Every row is summed in the same order, however many rows a call has: a row's result never depends on
// the rows beside it.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>

#include "quantized_inputs.h"

namespace {

constexpr int CHAINS = 4;  // sums that do not wait for each other

// Adds x[k] times row k of a matrix, LANES wide, of each k.
inline void accumulate(const at::Half* from, int64_t step, const float* x, int64_t count, Floats (&sums)[CHAINS]) {
  int64_t k = 0;
  for (; k + CHAINS <= count; k += CHAINS)
    for (int i = 0; i < CHAINS; ++i) sums[i] += load(from + (k + i) * step) * x[k + i];
  for (int i = 0; k < count; ++i, ++k) sums[i] += load(from + k * step) * x[k];
}

// A low-rank adapter beside the weights: B A x is added to the results.
struct Adapter {
  std::unique_ptr<float[]> inner;  // [M, rank]: A x
  int64_t rank = 0, depth = 0;     // of B, those of a block's columns that are kept
  const at::Half* b = nullptr;     // [N / BLOCK, depth, BLOCK]
  const int32_t* starts = nullptr; // [N / BLOCK]: the first column of a block that is kept

  Adapter() = default;

  // a [K, rank] float16, rank filled up to whole vectors; x [M, K].
  Adapter(const float* x, int64_t M, int64_t K, const at::Tensor& a, const at::Tensor& b, const at::Tensor& starts)
      : inner(new float[M * a.size(1)]), rank(a.size(1)), depth(b.size(1)), b(b.const_data_ptr<at::Half>()),
        starts(starts.const_data_ptr<int32_t>()) {
    const at::Half* from = a.const_data_ptr<at::Half>();
    at::parallel_for(0, rank / LANES, std::max<int64_t>(1, 32768 / (K * LANES * M)), [&](int64_t begin, int64_t end) {
      for (int64_t r = 0; r < M; ++r)
        for (int64_t v = begin; v < end; ++v) {
          Floats sums[CHAINS] = {};
          accumulate(from + v * LANES, rank, x + r * K, K, sums);
          for (int i = 1; i < CHAINS; ++i) sums[0] += sums[i];
          store(inner.get() + r * rank + v * LANES, sums[0]);
        }
    });
  }

  // Its part of LANES outputs of a row, n on in a block.
  Floats part(int64_t row, int64_t block, int n) const {
    const float* x = inner.get() + row * rank + starts[block];
    const at::Half* from = b + block * depth * BLOCK + n;
    Floats sums[CHAINS] = {};
    accumulate(from, BLOCK, x, depth, sums);
    for (int i = 1; i < CHAINS; ++i) sums[0] += sums[i];
    return sums[0];
  }
};

// Where results go, and what else a product is to know.
struct Results {
  float* out;         // [M, N]
  int64_t N;
  const float* bias;  // [N], or none
  bool streamed;
  Adapter adapter;    // of depth 0 if there is none
};

// R rows times one block of outputs, of which those from N on are padding.
template <int BITS, int R, int V>
void rows(const Inputs<BITS>& in, int64_t row, const int32_t* w, const at::Half* s, const Results& to,
          int64_t block) {
  for (int start = 0; start < BLOCK; start += V * LANES) {
    Floats total[R][V] = {};
    in.template tile<R, V>(row, w, s, start, to.streamed, total);
    for (int v = 0; v < V; ++v) {
      const int64_t n = block * BLOCK + start + v * LANES, count = std::min<int64_t>(LANES, to.N - n);
      if (count <= 0) return;
      float offset[LANES] = {};
      if (to.bias) std::copy_n(to.bias + n, count, offset);
      for (int r = 0; r < R; ++r) {
        Floats sum = total[r][v] + load(offset);
        if (to.adapter.depth) sum += to.adapter.part(row + r, block, start + v * LANES);
        float* out = to.out + (row + r) * to.N + n;
        if (count == LANES)
          store(out, sum);
        else
          for (int i = 0; i < count; ++i) out[i] = sum[i];
      }
    }
  }
}

template <int BITS>
void multiply(const float* x, int64_t M, int64_t inputs, const at::Tensor& weight,
              const at::Tensor& scales, const Results& to) {
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
        const auto run = [&](auto kernel) { kernel(in, r, w + b * w_step, s + b * s_step, to, b); };
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
          case 9: run(rows<BITS, 9, 2>); break;
          case 10: run(rows<BITS, 10, 2>); break;
          case 11: run(rows<BITS, 11, 2>); break;
          case 12: run(rows<BITS, 12, 2>); break;
          case 13: run(rows<BITS, 13, 2>); break;
          case 14: run(rows<BITS, 14, 2>); break;
#endif
        }
      }
  });
}

at::Tensor adapted_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                          const std::optional<at::Tensor>& bias, int64_t bits, int64_t outputs,
                          bool streamed, const std::optional<at::Tensor>& a, const std::optional<at::Tensor>& b,
                          const std::optional<at::Tensor>& starts) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "quantised layers take float32 inputs");
  const at::Tensor in = x.contiguous();
  const int64_t K = in.size(-1), M = in.numel() / K;
  auto shape = in.sizes().vec();
  shape.back() = outputs;
  at::Tensor out = at::empty(shape, in.options());
  const float* from = in.const_data_ptr<float>();
  Results to{out.mutable_data_ptr<float>(), outputs, bias ? bias->const_data_ptr<float>() : nullptr, streamed, {}};
  if (a) to.adapter = Adapter(from, M, K, *a, *b, *starts);
  const auto run = bits == 4 ? multiply<4> : bits == 8 ? multiply<8> : multiply<16>;
  run(from, M, K, weight, scales, to);
  return out;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                  const std::optional<at::Tensor>& bias, int64_t bits, int64_t outputs, bool streamed) {
  return adapted_linear(x, weight, scales, bias, bits, outputs, streamed, {}, {}, {});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(multirate, m) {
  m.def("quantized_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int bits, int outputs,"
        " bool streamed) -> Tensor");
  m.impl("quantized_linear", c10::DispatchKey::CPU, linear);
  m.def("adapted_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int bits, int outputs,"
        " bool streamed, Tensor? a, Tensor? b, Tensor? starts) -> Tensor");
  m.impl("adapted_linear", c10::DispatchKey::CPU, adapted_linear);
}
