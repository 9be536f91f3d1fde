// Attention of a block's positions over the keys and values of a text, for CPUs: float32 throughout.
//
// Slots are taken in chunks of CHUNK. Of each chunk a query gets a partial result: its highest score, the
// sum of its weights relative to that, and the values so weighted. Partial results are merged in the order
// of the slots. A vector's lanes are queries while scores are computed, so nothing is ever summed across
// lanes, and a query's result does not depend on the queries beside it; slots that it does not see, inside
// a chunk or behind the text, add exactly nothing. So what no query of a tile sees is left out.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "vectors.h"

namespace {

// Most vectors of a value that are summed in registers.
#ifdef __AVX512F__
constexpr int DEPTH = 4;
#else
constexpr int DEPTH = 2;
#endif
constexpr int CHUNK = 64;      // slots
constexpr int QUERIES = 128;   // most that pass over the slots together
constexpr int TILE = 6;        // most queries whose values are summed in registers
constexpr int AHEAD = 1024;    // floats between those read and those asked for: 4 KiB
constexpr float LOWEST = std::numeric_limits<float>::lowest();

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

// Not inlined: there, its pointers would not fit the registers.
// Scores [slots, V * LANES] of the queries [d, V * LANES], for a chunk of keys.
template <int V>
[[gnu::noinline]] void score(const float* queries, const float* keys, int64_t stride, int64_t slots,
                             int64_t d, float* scores) {
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
void weigh(const float* weight, int64_t width, const float* values, int64_t stride,
                             int64_t slots, float* out, int64_t d) {
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

// Partial results of some queries: values [queries, d], and of each its highest score and sum of weights.
struct Part {
  float *values, *top, *sum;

  static int64_t size(int64_t queries, int64_t d) { return queries * d + 2 * whole(queries); }

  static Part at(float* memory, int64_t queries, int64_t d) {
    return {memory, memory + queries * d, memory + queries * d + whole(queries)};
  }

  Part from(int64_t query, int64_t d) const { return {values + query * d, top + query, sum + query}; }
};

// Queries of a kv head, in one or two vectors. Query i of a kv head is position i / groups of its query
// head i % groups; a tile's first is of this head.
struct Tile {
  int64_t b, h, count, position, head;
};

struct Attention {
  const float *queries, *keys, *values;
  at::IntArrayRef query_stride, key_stride, value_stride;
  const uint64_t* seen;  // [rows or 1, positions, chunks], a bit for each slot
  int64_t seen_row;
  int64_t groups, d, length, chunks;  // groups: query heads of one kv head
  float scale;

  // Calls f for each position of a tile: its number, the first of its queries, and how many they are.
  template <typename F>
  void each_position(const Tile& tile, F f) const {
    int64_t position = tile.position, head = tile.head;
    for (int64_t i = 0, same; i < tile.count; i += same, ++position, head = 0) {
      same = std::min(tile.count - i, groups - head);
      f(position, i, same);
    }
  }

  uint64_t seen_by(const Tile& tile, int64_t position, int64_t chunk) const {
    return seen[tile.b * seen_row + position * chunks + chunk];
  }

  // The slots of a chunk that any query of a tile sees.
  uint64_t seen_by_any(const Tile& tile, int64_t chunk) const {
    uint64_t any = 0;
    each_position(tile, [&](int64_t position, auto...) { any |= seen_by(tile, position, chunk); });
    return any;
  }

  // Transposed queries of a tile, [d, lanes]. Lanes without a query are zeros: what else lies there may be
  // denormal numbers, which some CPUs multiply a hundred times slower.
  void transpose(const Tile& tile, float* to) const {
    const int64_t width = whole(tile.count);
    for (int64_t k = 0; k < d; ++k) std::fill(to + k * width + tile.count, to + (k + 1) * width, 0.0f);
    each_position(tile, [&](int64_t position, int64_t i, int64_t same) {
      const float* from = queries + tile.b * query_stride[0] + position * query_stride[2];
      from += (tile.h * groups + (i ? 0 : tile.head)) * query_stride[1];
      for (const int64_t end = i + same; i < end; ++i, from += query_stride[1])
        for (int64_t k = 0; k < d; ++k) to[k * width + i] = from[k] * scale;
    });
  }

  // Partial results of a chunk, of which the queries see the slots in `any`.
  void partial(const Tile& tile, int64_t chunk, uint64_t any, const float* transposed, Part out) const {
    // What lies before and behind all that they see is left out; it would add nothing.
    const int64_t low = std::countr_zero(any), slots = CHUNK - std::countl_zero(any) - low;
    const int64_t start = chunk * CHUNK + low;
    const float* k = keys + tile.b * key_stride[0] + tile.h * key_stride[1] + start * key_stride[2];
    const float* v = values + tile.b * value_stride[0] + tile.h * value_stride[1];
    v += start * value_stride[2];
    alignas(64) float scores[CHUNK * 2 * LANES];
    constant<2>(whole(tile.count) / LANES, [&](auto vectors) {
      constexpr int V = vectors();
      score<V>(transposed, k, key_stride[2], slots, d, scores);
      hide(tile, chunk, low, slots, scores, V * LANES);
      weights<V>(scores, slots, out.top, out.sum);
      for (int64_t t = 0, T; t < tile.count; t += T) {
        const int64_t left = tile.count - t, parts = (left + TILE - 1) / TILE;
        T = (left + parts - 1) / parts;  // parts of like size
        float* to = out.values + t * d;
        int64_t i = 0;
        constant<TILE>(T, [&](auto queries) {
          for (int64_t D; i + LANES <= d; i += D * LANES) {
            D = std::min<int64_t>(DEPTH, (d - i) / LANES);
            constant<DEPTH>(D, [&](auto depth) {
              weigh<queries(), depth()>(scores + t, V * LANES, v + i, value_stride[2], slots, to + i, d);
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

  // No score for what a query does not see. Most chunks are seen whole.
  void hide(const Tile& tile, int64_t chunk, int64_t low, int64_t slots, float* scores,
            int64_t width) const {
    const uint64_t asked = ~uint64_t{0} >> (CHUNK - slots) << low;
    each_position(tile, [&](int64_t position, int64_t i, int64_t same) {
      for (uint64_t hidden = asked & ~seen_by(tile, position, chunk); hidden; hidden &= hidden - 1)
        std::fill_n(scores + (std::countr_zero(hidden) - low) * width + i, same,
                    -std::numeric_limits<float>::infinity());
    });
  }

  // Adds a chunk's partial results to those of the chunks before it.
  void merge(int64_t count, Part part, Part all) const {
    for (int64_t i = 0; i < count; i += LANES) {
      const Floats before = load(all.top + i), now = load(part.top + i), highest = larger(before, now);
      const Floats keep = exponential(before - highest), add = exponential(now - highest);
      store(all.top + i, highest);
      store(all.sum + i, load(all.sum + i) * keep + load(part.sum + i) * add);
      for (int64_t q = i; q < std::min<int64_t>(i + LANES, count); ++q) {
        if (part.sum[q] == 0) continue;
        float* to = all.values + q * d;
        const float* from = part.values + q * d;
        for (int64_t k = 0; k < d; ++k) to[k] = to[k] * keep[q - i] + from[k] * add[q - i];
      }
    }
  }
};

// A mask [rows, 1, positions, slots] with a bit for each slot: [rows, positions, chunks].
std::vector<uint64_t> pack(const at::Tensor& mask) {
  const int64_t positions = mask.size(2), length = mask.size(3), step = mask.stride(3);
  const int64_t chunks = (length + CHUNK - 1) / CHUNK;
  const int64_t lines = mask.size(0) * positions, grain = 4096 / (chunks + 1) + 1;
  std::vector<uint64_t> packed(lines * chunks);
  at::parallel_for(0, lines, grain, [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line) {
      const bool* seen = mask.const_data_ptr<bool>() + line / positions * mask.stride(0);
      seen += line % positions * mask.stride(2);
      uint64_t* word = packed.data() + line * chunks;
      int64_t s = 0;
      for (uint64_t eight; step == 1 && s + 8 <= length; s += 8) {
        std::memcpy(&eight, seen + s, 8);  // bytes of 0 or 1; the product's highest has a bit of each
        word[s / CHUNK] |= (eight * 0x0102040810204080 >> 56) << s % CHUNK;
      }
      for (; s < length; ++s) word[s / CHUNK] |= uint64_t{seen[s * step]} << s % CHUNK;
    }
  });
  return packed;
}

at::Tensor attend(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                  const at::Tensor& mask, double scale) {
  const auto floats = [](const at::Tensor& x) {
    TORCH_CHECK(x.scalar_type() == at::kFloat, "attend takes float32 queries, keys and values");
    return x.stride(3) == 1 ? x : x.contiguous();
  };
  const at::Tensor q = floats(query), k = floats(keys), v = floats(values);
  TORCH_CHECK(mask.scalar_type() == at::kBool, "attend takes a bool mask");
  const int64_t B = q.size(0), H = q.size(1), n = q.size(2), d = q.size(3), KV = k.size(1);
  const int64_t groups = H / KV, length = mask.size(3), chunks = (length + CHUNK - 1) / CHUNK;
  const std::vector<uint64_t> seen = pack(mask);
  const Attention a{q.const_data_ptr<float>(), k.const_data_ptr<float>(), v.const_data_ptr<float>(),
                    q.strides(), k.strides(), v.strides(), seen.data(),
                    mask.size(0) == 1 ? 0 : n * chunks, groups, d, length, chunks,
                    static_cast<float>(scale)};
  at::Tensor out = at::empty({B, n, H, d}, q.options());
  float* result = out.mutable_data_ptr<float>();

  int64_t begin = chunks, end = 0;  // the chunks that any query sees
  for (size_t line = 0; line < seen.size(); line += chunks)
    for (int64_t c = 0; c < chunks; ++c)
      if (seen[line + c]) {
        begin = std::min(begin, c);
        end = std::max(end, c + 1);
      }

  // Blocks of queries share a pass over the slots: large ones read these less often, small ones occupy
  // all threads. Where there are too few, each chunk is a task of its own, and who finishes a block's last
  // one merges them.
  const int64_t total = n * groups, threads = at::get_num_threads();
  const auto passes_of = [&](int64_t queries) { return B * KV * ((total + queries - 1) / queries); };
  int64_t block = QUERIES;
  while (block > 2 * LANES && passes_of(block) < 8 * threads) block /= 2;
  const bool split = end - begin > 1 && passes_of(block) < 4 * threads;
  if (split) block = QUERIES;
  const int64_t passes = passes_of(block), span = split ? end - begin : 1, tasks = passes * span;

  const int64_t most = std::min(total, block), size = Part::size(most, d);
  const at::Tensor shared = at::empty({split ? tasks * size : 0}, q.options());
  std::vector<std::atomic<int64_t>> left(passes);
  for (auto& count : left) count = span;
  std::atomic<int64_t> next = 0;
  // A thread gets at least so many multiplications of vectors, or starting it costs more than it saves.
  const int64_t work = whole(most) / LANES * passes * (end - begin) * CHUNK * d, enough = 16384;
  const int64_t used = std::clamp<int64_t>((work + enough - 1) / enough, 1, threads);
  at::parallel_for(0, used, 1, [&](int64_t worker, int64_t workers) {
    const at::Tensor own = at::empty({2 * size + (most + 2 * LANES) * d}, q.options());
    float *local = own.mutable_data_ptr<float>(), *transposed = local + 2 * size;
    const Part all = Part::at(local, most, d);
    std::vector<Tile> tiles;
    // Chunks go to threads in runs, since who has just computed their parts merges them fastest. Passes go
    // to who is free, the last first: later positions see more, as a rule.
    const int64_t stop = split ? tasks * workers / used : tasks;
    int64_t known = -1;
    const auto after = [&](int64_t task) { return split ? task + 1 : next++; };
    for (int64_t task = split ? tasks * worker / used : next++; task < stop; task = after(task)) {
      const int64_t pass = passes - 1 - task / span, head = pass % (B * KV);
      const int64_t first = pass / (B * KV) * block, count = std::min(block, total - first);
      if (pass != std::exchange(known, pass)) {
        tiles.clear();
        for (int64_t i = 0; i < count; i += 2 * LANES) {
          const int64_t position = (first + i) / groups, of = (first + i) % groups;
          tiles.push_back({head / KV, head % KV, std::min<int64_t>(2 * LANES, count - i), position, of});
          a.transpose(tiles.back(), transposed + i * d);
        }
      }
      // For every chunk that a tile sees any of: f(tile, its first query, where its results are, what
      // computes these).
      const auto each = [&](int64_t from, int64_t to, auto f) {
        for (int64_t c = from; c < to; ++c) {
          const int64_t place = (pass * span + c - begin) * size;
          float* parts = split ? shared.mutable_data_ptr<float>() + place : local + size;
          for (size_t t = 0; t < tiles.size(); ++t)
            if (const uint64_t any = a.seen_by_any(tiles[t], c)) {
              const int64_t i = t * 2 * LANES;
              const Part part = Part::at(parts, most, d).from(i, d);
              f(tiles[t], i, part, [&] { a.partial(tiles[t], c, any, transposed + i * d, part); });
            }
        }
      };
      if (split) {
        const int64_t c = begin + task % span;
        each(c, c + 1, [](const Tile&, int64_t, Part, auto compute) { compute(); });
        if (--left[pass]) continue;
      }
      std::fill_n(local, size, 0.0f);
      std::fill_n(all.top, whole(most), LOWEST);
      each(begin, end, [&](const Tile& tile, int64_t i, Part part, auto compute) {
        if (!split) compute();
        a.merge(tile.count, part, all.from(i, d));
      });
      for (int64_t i = 0; i < count; ++i) {
        const float inverse = all.sum[i] > 0 ? 1 / all.sum[i] : 0;
        const int64_t position = (first + i) / groups, j = head % KV * groups + (first + i) % groups;
        float* to = result + ((head / KV * n + position) * H + j) * d;
        for (int64_t x = 0; x < d; ++x) to[x] = all.values[i * d + x] * inverse;
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
