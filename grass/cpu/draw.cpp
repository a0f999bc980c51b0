// The rows that layers explore next: drawn, and their values gathered. One call takes many layers: small ones go to
// one thread each, of the values of others every thread gathers a part.

#include "kernel.h"

#include <algorithm>
#include <functional>
#include <omp.h>

namespace {

// What _LAYER in draw.py packs. `chosen` holds r selected rows and has room for q of the other `total - r`. The weight's
// row i has `width` values, value j at weight[i * row + j * step]; `explored` is where row chosen[r + k] goes.
struct Layer {
    const void* weight;
    void* explored;
    int64_t* chosen;
    int64_t total, r, q, width, itemsize, row, step, explored_row, explored_step, key;

    bool is_small() const { return q * width < 1 << 16; }  // one thread's, in its cache
};

constexpr uint32_t DRAW = 6;  // a Stream of random_bits.py, which has the formulas

inline uint32_t mix(uint32_t word) {
    word = (word ^ word >> 16) * 0x7FEB352D;
    word = (word ^ word >> 15) * 0x846CA68B;
    return word ^ word >> 16;
}

// The q unselected rows with the largest bits, ascending. Only bits whose upper byte is that of the q-th largest are
// compared with each other.
void draw(const Layer& x) {
    std::vector<uint32_t> bits(x.total), close;
    std::vector<uint8_t> is_free(x.total, 1);
    for (int64_t k = 0; k < x.r; ++k) is_free[x.chosen[k]] = 0;
    const uint32_t low = x.key, high = (x.key >> 32) + DRAW * 0x9E3779B1;
#pragma omp simd
    for (int64_t i = 0; i < x.total; ++i) bits[i] = mix(mix(static_cast<uint32_t>(i) ^ low) + high);
    int64_t counts[256] = {}, left = x.q;
    for (int64_t i = 0; i < x.total; ++i) counts[bits[i] >> 24] += is_free[i];
    uint32_t upper = 255;
    while (counts[upper] < left) left -= counts[upper--];
    for (int64_t i = 0; i < x.total; ++i)
        if (bits[i] >> 24 == upper && is_free[i]) close.push_back(bits[i]);
    std::nth_element(close.begin(), close.begin() + left - 1, close.end(), std::greater<>());
    const uint32_t least = close[left - 1];
    int64_t* drawn = x.chosen + x.r;
    for (int64_t i = 0, k = 0; k < x.q; ++i) {
        drawn[k] = i;
        k += is_free[i] & (bits[i] >= least);
    }
}

// Where the values of a row are neighbours in memory, of weight and explored rows.
template <typename Value>
void copy_rows(const Layer& x, const Value* weight, Value* explored, const int64_t* drawn, const Team& team) {
    for (int64_t k = team.begin(x.q); k < team.end(x.q); ++k)
        std::copy_n(weight + drawn[k] * x.row, x.width, explored + k * x.explored_row);
}

// Where the values of a column are.
template <typename Value>
void pick_columns(const Layer& x, const Value* weight, Value* explored, const int64_t* drawn, const Team& team) {
    for (int64_t j = team.begin(x.width); j < team.end(x.width); ++j) {
        const Value* from = weight + j * x.step;
        Value* to = explored + j * x.explored_step;
        for (int64_t i = 0; i < x.total; i += 64 / sizeof(Value)) __builtin_prefetch(from + x.step + i);  // the next one
        for (int64_t k = 0; k < x.q; ++k) to[k] = from[drawn[k]];
    }
}

// Any strides: a cache line of each row at a time.
template <typename Value>
void transpose(const Layer& x, const Value* weight, Value* explored, const int64_t* drawn, const Team& team) {
    const int64_t line = 64 / sizeof(Value), end = team.end(x.width);
    for (int64_t begin = team.begin(x.width); begin < end; begin += line)
        for (int64_t k = 0; k < x.q; ++k)
            for (int64_t j = begin; j < std::min(begin + line, end); ++j)
                explored[k * x.explored_row + j * x.explored_step] = weight[drawn[k] * x.row + j * x.step];
}

template <typename Value>
void gather(const Layer& x, const Team& team) {
    const bool rows = x.step == 1 && x.explored_step == 1, columns = x.row == 1 && x.explored_row == 1;
    const auto how = rows ? copy_rows<Value> : columns ? pick_columns<Value> : transpose<Value>;
    how(x, static_cast<const Value*>(x.weight), static_cast<Value*>(x.explored), x.chosen + x.r, team);
}

void gather_one(const Layer& x, const Team& team) {
    if (x.itemsize == 2) gather<uint16_t>(x, team);
    if (x.itemsize == 4) gather<uint32_t>(x, team);
    if (x.itemsize == 8) gather<uint64_t>(x, team);
}

}  // namespace

extern "C" void explore(const Layer* layers, int64_t count, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const Team alone{0, 1, nullptr}, all{omp_get_thread_num(), omp_get_num_threads(), nullptr};
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; ++i) {
            draw(layers[i]);
            if (layers[i].is_small()) gather_one(layers[i], alone);
        }
        for (int64_t i = 0; i < count; ++i)
            if (!layers[i].is_small()) gather_one(layers[i], all);
    }
}
