// AdamW on float32 masters of bfloat16 weights: reads bfloat16 gradients, writes masters, moments and rounded weights, in
// one pass. Formulas in functional.py. 28 bytes are moved for each weight.

#include "kernel.h"

#include <cstring>

namespace {

inline float widened(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// To the nearest, ties to even; what is not a number stays so.
inline uint16_t rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>(value == value ? nearest : bits >> 16 | 0x40);
}

}  // namespace

extern "C" void step_masters(float* master, const uint16_t* grad, uint16_t* weight, float* exp_avg, float* exp_avg_sq,
                             int64_t count, float step_size, float unbias, float shrink, float complement1, float beta2,
                             float complement2, float eps, float scale, int threads) {
    const Adam a{0, 0, complement1, beta2, complement2, eps, scale};
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (int64_t i = 0; i < count; ++i) {
        const float update = step_size * a.direction(widened(grad[i]), exp_avg[i], exp_avg_sq[i], unbias);
        master[i] = master[i] * shrink - update;
        weight[i] = rounded(master[i]);
    }
}
