// What the caller hands over. The callers read these structs from here (`Struct`): fields are numbers of 64 bits, pointers and
// other structs.

#pragma once

#include "numbers.h"

namespace {

constexpr i64 MOST_CHANNELS = 1024; // of a head
using Weights = void;
using Sums = void; // of the types that a call has for weights and rows, and for sums

// A format of few bits: sizes of its blocks, and calls of the `product/cpu.cpp` that is compiled for it. x: `Activations`.
using RowsOf = void(const void *w, const void *bias, i64 type, i64 first, i64 end, const void *x, i64 N, float *y, i64 stride, int add);
using Unpack = void(const void *w, i64 K, float *out);
struct Format {
    i64 block, nbytes;
    RowsOf *rows;
    Unpack *unpack;
};
// halved: whether weights of float32 are copied in bfloat16. format: null where they are not in few bits.
struct Linear {
    const void *weight;
    const Weights *bias;
    i64 rows, halved;
    const Format *format;
};
struct Layer {
    const Weights *norm, *query_norm, *key_norm, *mlp_norm;
    Linear query, key, value, out, gate, up, down, fc1, fc2;
    double norm_eps, head_eps, mlp_eps, scaling;
};
struct Decoder {
    i64 layers, width, query_heads, heads, channels, vocabulary;
    Linear words;
    const Weights *norm;
    double eps;
    Linear head;
    const Layer *layer;
};
struct Packed {
    uint8_t *key_codes, *value_codes;
    void *group; // int16 or int32
    f16 *key_step, *key_zero, *value_step, *value_zero; // of 8 bits each row's own; of fewer bits keys have those of their group
    Weights *tail_keys, *tail_values;
    i64 bits, group_bytes, groups, value_groups, tail_room, tail;
};
struct Rows {
    Weights *keys, *values;
    int32_t *positions;
    float *scores, *stats;
    const i64 *starts, *lengths; // before the token
    const Sums *cos, *sin;       // tables [S, R] by which rows are rotated as they are read
    const Sums *own_cos, *own_sin; // of the new token [R], where rows are rotated as they are written
    i64 position, rotated, before, window, stats_stride, statistics, by_head; // before: -1, or tokens before true distances
    const Packed *packed;
};

enum { ABOVE = 1, SQUARE = 2, SUM = 4 }; // statistics, in the order of their names

} // namespace
