// Threads, and products of matrices with the vectors of all texts.

#pragma once

#include <atomic>
#include <memory>
#include <omp.h>
#include <sched.h>

#include "blocks.h"
#include "layout.h"

namespace {

constexpr i64 SHARE = 32768; // bytes of weights in one item of a matrix product, about
constexpr i64 AHEAD = 8192;  // weights that are read ahead at most: of four rows, and they fit into a core's nearest cache

struct Team {
    struct alignas(64) Taken { std::atomic<i64> items{0}; }; // a cache line each
    int threads;
    std::atomic<int> arrived{0}, round{0};
    std::unique_ptr<Taken[]> taken; // [phases, threads]

    Team(int threads, i64 phases) : threads(threads), taken(new Taken[phases * threads]) {}
    void wait() {
        if (threads == 1) return;
        int mine = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int tries = 0; round.load(std::memory_order_acquire) == mine; tries++)
            if (tries > 4000) sched_yield(); // others may need the core on which the last one shall run
    }
    // Every thread has a part of its own, in which memory is read onwards, and helps with the others' after it.
    template <class F> void share(i64 phase, i64 items, F act) {
        for (int t = 0, own = omp_get_thread_num(); t < threads; t++) {
            i64 whose = (own + t) % threads, first = items * whose / threads, end = items * (whose + 1) / threads;
            auto &next = taken[phase * threads + whose].items;
            for (i64 i; (i = first + next.fetch_add(1, std::memory_order_relaxed)) < end;) act(i);
        }
    }
};

// ---- matrix products -------------------------------------------------------------------------------------------------

template <class W, class A, class B, int R, int M> inline void tile(const W *w, i64 K, const A *x, A *y, i64 stride, bool add, const B *bias) {
    Wide<A> sum[R][M] = {};
    const W *ahead = w + std::min(R * K, AHEAD); // the rows after these, or further numbers of long ones
    i64 i = 0;
    for (; i + lanes<A> <= K; i += lanes<A>) {
        Wide<A> ws[R];
        if constexpr (R > 1) {
            UNROLL for (int r = 0; r < R; r++) __builtin_prefetch(ahead + r * K + i);
        }
        UNROLL for (int r = 0; r < R; r++) ws[r] = load(w + r * K + i);
        UNROLL for (int m = 0; m < M; m++) {
            Wide<A> xs = load(x + m * K + i);
            UNROLL for (int r = 0; r < R; r++) sum[r][m] = added(sum[r][m], ws[r], xs);
        }
    }
    UNROLL for (int m = 0; m < M; m++) {
        A out[R];
        if constexpr (R == 4) totals(sum[0][m], sum[1][m], sum[2][m], sum[3][m], out);
        else out[0] = total(sum[0][m], A());
        for (int r = 0; r < R; r++) {
            for (i64 j = i; j < K; j++) out[r] += number(w[r * K + j]) * x[m * K + j];
            if (bias) out[r] += number(bias[r]);
            A &to = y[m * stride + r];
            to = add ? to + out[r] : out[r];
        }
    }
}

template <class W, class A, class B, int R>
void row_tiles(const W *w, i64 K, const A *x, i64 N, A *y, i64 stride, bool add, const B *bias) {
    for (; N >= 4; N -= 4, x += 4 * K, y += 4 * stride) tile<W, A, B, R, 4>(w, K, x, y, stride, add, bias);
    if (N == 3) tile<W, A, B, R, 3>(w, K, x, y, stride, add, bias);
    if (N == 2) tile<W, A, B, R, 2>(w, K, x, y, stride, add, bias);
    if (N == 1) tile<W, A, B, R, 1>(w, K, x, y, stride, add, bias);
}

template <class W, class A, class B>
void rows_of(const W *w, const B *bias, i64 first, i64 end, i64 K, const A *x, i64 N, A *y, i64 stride, bool add) {
    for (i64 row = first; row < end;) {
        const B *own = bias ? bias + row : nullptr;
        bool four = row + 4 <= end;
        (four ? row_tiles<W, A, B, 4> : row_tiles<W, A, B, 1>)(w + row * K, K, x, N, y + row, stride, add, own);
        row += four ? 4 : 1;
    }
}

// What matrices are multiplied with: N rows of K numbers, for packed matrices in 8 bits too, for which there is room in `eight`.
template <class A> struct Input {
    const A *numbers;
    i64 N, K;
    Activations *eight = nullptr;
    bool taken = false;

    // The numbers that `matrix` asks for beside the plain ones, each thread for itself.
    void prepare(const Linear &matrix) {
        if constexpr (sizeof(A) == 4) {
            if (!matrix.format || taken) return;
            eight->resize(N, K);
            for (i64 n = 0; n < N; n++) eight->take(numbers + n * K, n);
            taken = true;
        }
    }
};

// Rows [first, end) of W x for all texts, the bias included, into columns of `y [N, stride]` or added to them.
template <class W, class A>
void product(const Linear &m, i64 first, i64 end, const Input<A> &x, A *y, i64 stride, bool add = false) {
    const W *bias = (const W *)m.bias;
    if constexpr (sizeof(A) == 4)
        if (m.format) return m.format->rows(m.weight, bias, 8 * sizeof(W), first, end, x.eight, x.N, y, stride, add);
    if constexpr (sizeof(W) == 4)
        if (m.halved) return rows_of((const bf16 *)m.weight, bias, first, end, x.K, x.numbers, x.N, y, stride, add);
    rows_of((const W *)m.weight, bias, first, end, x.K, x.numbers, x.N, y, stride, add);
}

template <class W> inline i64 row_bytes(const Linear &m, i64 K) {
    return m.format ? K / m.format->block * m.format->nbytes : K * (m.halved ? 2 : sizeof(W));
}

// Row `row` of a matrix of K columns.
template <class W, class A> void read_row(const Linear &m, i64 row, i64 K, A *out) {
    const char *at = (const char *)m.weight + row * row_bytes<W>(m, K);
    if constexpr (sizeof(A) == 4)
        if (m.format) return m.format->unpack(at, K, out);
    for (i64 k = 0; k < K; k++) out[k] = number(((const W *)at)[k]);
}

// Rows of a matrix of K columns in one item of work.
template <class W> inline i64 share_of(const Linear &m, i64 K) {
    return std::max<i64>(4, SHARE / row_bytes<W>(m, K) / 4 * 4);
}
inline i64 parts(i64 n, i64 each) { return (n + each - 1) / each; }

// As the backbones': in float32 whatever the type, and the weight after rounding to it.
template <class W, class A> inline void rms_norm(const A *x, const void *weight, double eps, i64 n, A *out) {
    const W *w = (const W *)weight;
    float sum = 0;
    wide_f32 wide = {};
    i64 i = 0;
    if constexpr (sizeof(A) == 4) for (; i + lanes<float> <= n; i += lanes<float>) wide = added(wide, load(x + i), load(x + i));
    sum = total(wide, 0.0f);
    for (; i < n; i++) sum += float(x[i]) * float(x[i]);
    float by = 1 / std::sqrt(sum / float(n) + float(eps));
    for (i64 j = 0; j < n; j++) out[j] = number(w[j]) * A(float(x[j]) * by);
}

} // namespace
