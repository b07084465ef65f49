// A layer's elementwise work between its products, each in one pass: what `__init__.py` beside this file defines, of float32 or
// bfloat16, rounded where the reference rounds.

#include <vector>

#include "numbers.h"

namespace {

template <class T> void rms_norm(const T *x, const T *residual, const T *weight, float eps, i64 C, T *sum, T *out, float *own) {
    for (i64 c = 0; c < C; c++) {
        own[c] = number(x[c]);
        if (residual) store(sum[c], number(residual[c]) + own[c]), own[c] = number(sum[c]);
    }
    float by = 1 / std::sqrt(dot<float>(own, own, C) / float(C) + eps);
    for (i64 c = 0; c < C; c++) {
        T rounded;
        store(rounded, own[c] * by);
        store(out[c], number(weight[c]) * number(rounded));
    }
}
template <class T> void swiglu(const T *gate, const T *up, i64 C, T *out, float *own) {
    for (i64 c = 0; c < C; c++) own[c] = number(gate[c]);
    silu(own, C);
    for (i64 c = 0; c < C; c++) {
        T rounded;
        store(rounded, own[c]);
        store(out[c], number(up[c]) * number(rounded));
    }
}

// F(first, a row of numbers) of each row.
template <class F> void rows(i64 N, i64 C, int threads, F each_row) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> own(C);
#pragma omp for
        for (i64 n = 0; n < N; n++) each_row(n, own.data());
    }
}

} // namespace

// The sum of x and, unless it is null, a residual, [N, C]; and that normalised by its root mean square and scaled. `type` as `TYPES`.
extern "C" void locret_rms_norm(
    const void *x, const void *residual, const void *weight, double eps, i64 N, i64 C, void *sum, void *out, int type, int threads) {
    auto with = [&](auto *own) {
        typedef std::remove_pointer_t<decltype(own)> T;
        rows(N, C, threads, [&](i64 n, float *room) {
            const T *other = residual ? (const T *)residual + n * C : nullptr;
            rms_norm((const T *)x + n * C, other, (const T *)weight, float(eps), C, (T *)sum + n * C, (T *)out + n * C, room);
        });
    };
    type == 16 ? with((bf16 *)nullptr) : with((float *)nullptr);
}

// up * silu(gate), [N, C] each, into out.
extern "C" void locret_swiglu(
    const void *gate, const void *up, i64 N, i64 C, i64 gate_row, i64 up_row, void *out, int type, int threads) {
    auto with = [&](auto *own) {
        typedef std::remove_pointer_t<decltype(own)> T;
        rows(N, C, threads, [&](i64 n, float *room) {
            swiglu((const T *)gate + n * gate_row, (const T *)up + n * up_row, C, (T *)out + n * C, room);
        });
    };
    type == 16 ? with((bf16 *)nullptr) : with((float *)nullptr);
}
