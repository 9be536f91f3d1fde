// Attention of a few query positions over the keys and values of a text, for CPUs: float32 throughout.
//
// Slots are taken in chunks of CHUNK. Of each chunk a query gets a partial result: its highest score, the
// sum of its weights relative to that, and the values so weighted. Partial results are merged in the order
// of the slots. A vector's lanes are queries while scores are computed, so nothing is ever summed across
// lanes, and a query's result does not depend on the queries beside it; slots that it does not see, inside
// a chunk or behind the text, add exactly nothing.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;  // of a vector
constexpr int DEPTH = 4;   // most vectors of a value that are summed in registers
#else
constexpr int LANES = 8;
constexpr int DEPTH = 2;
#endif
constexpr int CHUNK = 64;      // slots
constexpr int QUERIES = 128;   // most that pass over the slots together
constexpr int TILE = 6;        // most queries whose values are summed in registers
constexpr int AHEAD = 1024;    // floats between those read and those asked for: 4 KiB
constexpr int LINE = 16;       // floats of a cache line
constexpr float LOWEST = std::numeric_limits<float>::lowest();

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// e^x for x <= 0, to 1e-7 of it; exactly 0 below -87.
inline Floats exponential(Floats x) {
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  const Floats bounded = larger(x, Floats{} - 88.0f), shifted = bounded * 1.44269504f + ROUND;
  const Floats n = shifted - ROUND, r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats y = r * (1.0f / 5040) + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const Ints power = ((Ints)shifted - (Ints)(Floats{} + ROUND) + 127) << 23;
  return x < -87.0f ? Floats{} : y * (Floats)power;
}

// A number of lanes, filled up to whole vectors.
inline int64_t whole(int64_t lanes) { return (lanes + LANES - 1) / LANES * LANES; }

// Calls f with a number from 1 to N as a constant.
template <int N, typename F>
inline void constant(int64_t n, F f) {
  if constexpr (N > 1)
    if (n < N) return constant<N - 1>(n, f);
  f(std::integral_constant<int, N>());
}

// Scores [slots, V * LANES] of the queries [d, V * LANES], for a chunk of keys.
template <int V>
void score(const float* queries, const float* keys, int64_t stride, int64_t slots, int64_t d,
           float* scores) {
  constexpr int SLOTS = LANES == 8 && V == 2 ? 4 : 8;  // what the registers hold
  for (int64_t first = 0; first < slots; first += SLOTS) {
    const float* rows[SLOTS];  // the last chunk's last rows repeat
    for (int s = 0; s < SLOTS; ++s) rows[s] = keys + std::min(first + s, slots - 1) * stride;
    Floats sum[SLOTS][V] = {};
    for (int64_t line = 0; line < d; line += LINE) {
      for (int s = 0; s < SLOTS; ++s) __builtin_prefetch(rows[s] + line + AHEAD);
      for (int64_t i = line; i < std::min(line + LINE, d); ++i) {
        Floats q[V];
        for (int v = 0; v < V; ++v) q[v] = load(queries + (i * V + v) * LANES);
#pragma GCC unroll 8
        for (int s = 0; s < SLOTS; ++s)
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) sum[s][v] += q[v] * rows[s][i];
      }
    }
    for (int s = 0; s < SLOTS; ++s)
      for (int v = 0; v < V; ++v) store(scores + ((first + s) * V + v) * LANES, sum[s][v]);
  }
}

// Scores become weights relative to the highest; that and the weights' sum, for each of V * LANES queries.
template <int V>
void weights(float* scores, int64_t slots, float* top, float* sum) {
  for (int v = 0; v < V; ++v) {
    float* column = scores + v * LANES;
    Floats highest = Floats{} + LOWEST, total = {};
    for (int64_t s = 0; s < slots; ++s) highest = larger(load(column + s * V * LANES), highest);
    for (int64_t s = 0; s < slots; ++s) {
      const Floats weight = exponential(load(column + s * V * LANES) - highest);
      store(column + s * V * LANES, weight);
      total += weight;
    }
    store(top + v * LANES, highest);
    store(sum + v * LANES, total);
  }
}

// For T queries, V vectors of their values [slots, stride] weighted by [slots, width]: out [T, d].
template <int T, int V>
void weigh(const float* weight, int64_t width, const float* values, int64_t stride, int64_t slots,
           float* out, int64_t d) {
  Floats sum[T][V] = {};
  for (int64_t s = 0; s < slots; ++s, values += stride, weight += width) {
    Floats value[V];
    for (int v = 0; v < V; ++v) {
      if (v * LANES % LINE == 0) __builtin_prefetch(values + v * LANES + AHEAD);
      value[v] = load(values + v * LANES);
    }
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[t][v] += value[v] * weight[t];
  }
  for (int t = 0; t < T; ++t)
    for (int v = 0; v < V; ++v) store(out + t * d + v * LANES, sum[t][v]);
}

struct Attention {
  const float *queries, *keys, *values;
  const bool* mask;
  at::IntArrayRef query_stride, key_stride, value_stride;
  int64_t mask_row, mask_query, mask_slot;
  int64_t groups, d, length;  // groups: query heads of one kv head
  float scale;

  // Query i of a kv head is position i / groups of query head i % groups.
  // Transposed queries of a kv head, [tile, d, lanes]; a tile is one or two vectors.
  void transpose(int64_t b, int64_t h, int64_t first, int64_t count, float* to) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t tile = i / (2 * LANES) * (2 * LANES);
      const int64_t width = std::min<int64_t>(2 * LANES, whole(count - tile));
      const int64_t head = h * groups + (first + i) % groups, position = (first + i) / groups;
      const float* from = queries + b * query_stride[0] + head * query_stride[1];
      from += position * query_stride[2];
      for (int64_t k = 0; k < d; ++k) to[tile * d + k * width + i - tile] = from[k] * scale;
    }
  }

  // Partial results of a chunk: values [count, d], then highest scores and sums, filled up to whole vectors.
  void partial(int64_t b, int64_t h, int64_t first, int64_t count, int64_t start,
               const float* transposed, float* out) const {
    const int64_t slots = std::min<int64_t>(CHUNK, length - start);
    const float* k = keys + b * key_stride[0] + h * key_stride[1] + start * key_stride[2];
    const float* v = values + b * value_stride[0] + h * value_stride[1] + start * value_stride[2];
    float *top = out + count * d, *sum = top + whole(count);
    for (int64_t tile = 0; tile < count; tile += 2 * LANES) {
      alignas(64) float scores[CHUNK * 2 * LANES];
      const int64_t many = std::min<int64_t>(2 * LANES, count - tile);
      constant<2>(whole(many) / LANES, [&](auto vectors) {
        constexpr int V = vectors();
        score<V>(transposed + tile * d, k, key_stride[2], slots, d, scores);
        hide(b, first + tile, many, start, slots, scores, V * LANES);
        weights<V>(scores, slots, top + tile, sum + tile);
        for (int64_t t = 0, T; t < many; t += T) {
          const int64_t left = many - t, tiles = (left + TILE - 1) / TILE;
          T = (left + tiles - 1) / tiles;  // tiles of like size
          float* to = out + (tile + t) * d;
          int64_t i = 0;
          constant<TILE>(T, [&](auto queries) {
            for (int64_t V; i + LANES <= d; i += V * LANES) {
              V = std::min<int64_t>(DEPTH, (d - i) / LANES);
              constant<DEPTH>(V, [&](auto depth) {
                weigh<queries(), depth()>(scores + t, vectors() * LANES, v + i, value_stride[2], slots,
                                          to + i, d);
              });
            }
          });
          for (; i < d; ++i)
            for (int64_t q = 0; q < T; ++q) {
              float total = 0;
              for (int64_t s = 0; s < slots; ++s)
                total += scores[s * V * LANES + t + q] * v[s * value_stride[2] + i];
              to[q * d + i] = total;
            }
        }
      });
    }
  }

  // No score for what a query does not see. Most chunks are seen whole.
  void hide(int64_t b, int64_t first, int64_t many, int64_t start, int64_t slots, float* scores,
            int64_t width) const {
    for (int64_t i = 0, same; i < many; i += same) {
      const int64_t position = (first + i) / groups;
      same = std::min(many - i, groups - (first + i) % groups);
      const bool* seen = mask + b * mask_row + position * mask_query + start * mask_slot;
      if (mask_slot == 1 && !std::memchr(seen, 0, slots)) continue;
      for (int64_t s = 0; s < slots; ++s)
        if (!seen[s * mask_slot])
          std::fill_n(scores + s * width + i, same, -std::numeric_limits<float>::infinity());
    }
  }

  // Adds a chunk's partial results to those of the chunks before it.
  void merge(const float* part, int64_t count, float* state) const {
    const float *top = part + count * d, *sum = top + whole(count);
    float *all_top = state + count * d, *all_sum = all_top + whole(count);
    for (int64_t i = 0; i < count; i += LANES) {
      const Floats before = load(all_top + i), now = load(top + i), highest = larger(before, now);
      const Floats keep = exponential(before - highest), add = exponential(now - highest);
      store(all_top + i, highest);
      store(all_sum + i, load(all_sum + i) * keep + load(sum + i) * add);
      for (int64_t q = 0; q < std::min<int64_t>(LANES, count - i); ++q) {
        if (sum[i + q] == 0) continue;
        float* to = state + (i + q) * d;
        const float* from = part + (i + q) * d;
        for (int64_t k = 0; k < d; ++k) to[k] = to[k] * keep[q] + from[k] * add[q];
      }
    }
  }
};

at::Tensor attend(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                  const at::Tensor& mask, double scale) {
  const auto floats = [](const at::Tensor& x) {
    TORCH_CHECK(x.scalar_type() == at::kFloat, "attend takes float32 queries, keys and values");
    return x.stride(3) == 1 ? x : x.contiguous();
  };
  const at::Tensor q = floats(query), k = floats(keys), v = floats(values);
  TORCH_CHECK(mask.scalar_type() == at::kBool, "attend takes a bool mask");
  const int64_t B = q.size(0), H = q.size(1), n = q.size(2), d = q.size(3), KV = k.size(1);
  const Attention a{q.const_data_ptr<float>(), k.const_data_ptr<float>(), v.const_data_ptr<float>(),
                    mask.const_data_ptr<bool>(), q.strides(), k.strides(), v.strides(),
                    mask.size(0) == 1 ? 0 : mask.stride(0), mask.stride(2), mask.stride(3),
                    H / KV, d, mask.size(3), static_cast<float>(scale)};
  at::Tensor out = at::empty({B, n, H, d}, q.options());
  float* result = out.mutable_data_ptr<float>();

  // Blocks of queries share a pass over the slots. Where these are too few to occupy all threads, each
  // chunk is a task of its own, and who finishes a block's last one merges them.
  const int64_t total = n * a.groups, blocks = (total + QUERIES - 1) / QUERIES;
  const int64_t chunks = (a.length + CHUNK - 1) / CHUNK, passes = B * KV * blocks;
  const bool split = passes < 4 * at::get_num_threads();
  const int64_t most = std::min<int64_t>(total, QUERIES), size = most * d + 2 * whole(most);
  const at::Tensor shared = at::empty({split ? passes * chunks * size : 0}, q.options());
  std::vector<std::atomic<int64_t>> left(passes);
  for (auto& count : left) count = chunks;
  // A thread gets at least so many multiplications of vectors, or starting it costs more than it saves.
  const int64_t work = whole(most) / LANES * std::min<int64_t>(CHUNK, a.length) * d;
  const int64_t grain = std::max<int64_t>(1, 16384 / (work * (split ? 1 : chunks) + 1));
  at::parallel_for(0, passes * (split ? chunks : 1), grain, [&](int64_t begin, int64_t end) {
    const at::Tensor own = at::empty({2 * size + (most + LANES) * d}, q.options());
    float *state = own.mutable_data_ptr<float>(), *local = state + size, *transposed = local + size;
    for (int64_t task = begin, known = -1; task < end; ++task) {
      const int64_t pass = split ? task / chunks : task, head = pass / blocks;
      const int64_t b = head / KV, h = head % KV, first = pass % blocks * QUERIES;
      const int64_t count = std::min<int64_t>(QUERIES, total - first);
      if (pass != known) a.transpose(b, h, first, count, transposed);
      known = pass;
      float* parts = split ? shared.mutable_data_ptr<float>() + pass * chunks * size : local;
      const auto run = [&](int64_t c, float* part) {
        a.partial(b, h, first, count, c * CHUNK, transposed, part);
      };
      if (split) {
        run(task % chunks, parts + task % chunks * size);
        if (--left[pass]) continue;
      }
      std::fill_n(state, size, 0.0f);
      std::fill_n(state + count * d, whole(count), LOWEST);
      for (int64_t c = 0; c < chunks; ++c) {
        if (!split) run(c, parts);
        a.merge(parts + (split ? c * size : 0), count, state);
      }
      for (int64_t i = 0; i < count; ++i) {
        const float sum = state[count * d + whole(count) + i], inverse = sum > 0 ? 1 / sum : 0;
        const int64_t position = (first + i) / a.groups, j = h * a.groups + (first + i) % a.groups;
        float* to = result + ((b * n + position) * H + j) * d;
        for (int64_t x = 0; x < d; ++x) to[x] = state[i * d + x] * inverse;
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(multirate, m) {
  m.def("attend(Tensor query, Tensor keys, Tensor values, Tensor mask, float scale) -> Tensor");
  m.impl("attend", c10::DispatchKey::CPU, attend);
}
