// Rounding to 16-bit floats, and as tensor cores round.
#pragma once
#include "hooks.h"

namespace emulator {

// A number rounded to even in a binary format of 1 + exponent + mantissa bits; infinite beyond its range.
template <int exponent, int mantissa> static inline unsigned short encode(double x) {
    const int bias = (1 << (exponent - 1)) - 1;
    const unsigned short sign = std::signbit(x) ? 0x8000 : 0, infinite = ((1 << exponent) - 1) << mantissa;
    if (std::isnan(x)) return 0x7fff;
    if (std::isinf(x)) return sign | infinite;
    const double size = std::fabs(x);
    int power;
    std::frexp(size, &power);
    power = power - 1 < 1 - bias ? 1 - bias : power - 1;
    if (size == 0 || power > bias) return sign | (size == 0 ? 0 : infinite);
    const auto steps = static_cast<unsigned>(std::nearbyint(std::ldexp(size, mantissa - power)));
    const unsigned bits = steps + (unsigned(power + bias - 1) << mantissa);  // a carry moves into the exponent
    return sign | (bits > infinite ? infinite : bits);
}

template <int exponent, int mantissa> static inline float decode(unsigned short x) {
    const int bias = (1 << (exponent - 1)) - 1, field = (x & 0x7fff) >> mantissa, rest = x & ((1 << mantissa) - 1);
    double size = field ? std::ldexp(rest + (1 << mantissa), field - bias - mantissa)
                        : std::ldexp(rest, 1 - bias - mantissa);
    if (field == (1 << exponent) - 1) size = rest ? NAN : INFINITY;
    return static_cast<float>(x & 0x8000 ? -size : size);
}

// a * b + c in double, the product exact and the sum rounded to odd: rounding it again gives the same as rounding once.
static inline double fma_odd(double a, double b, double c) {
    const double product = a * b, sum = product + c, part = sum - product;
    const double error = (product - (sum - part)) + (c - part);
    if (error == 0 || !std::isfinite(sum)) return sum;
    int64_t bits;
    std::memcpy(&bits, &sum, 8);
    if (!(bits & 1)) bits += (error > 0) == (sum > 0) ? 1 : -1;
    double odd;
    std::memcpy(&odd, &bits, 8);
    return odd;
}

// Tensor cores cut off what does not fit instead of rounding it.
static inline float cut(double x) {
    const float y = static_cast<float>(x);
    return std::isfinite(y) && std::fabs(y) > std::fabs(x) ? std::nextafterf(y, 0.0f) : y;
}

}  // namespace emulator
