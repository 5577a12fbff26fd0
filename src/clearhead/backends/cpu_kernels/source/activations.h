// The functions between the products of a feed-forward branch (model/feed_forward.py).
#pragma once
#include <algorithm>
#include <cmath>

#include "vectors.h"

enum ActivationKind : int32_t { IDENTITY, RELU, GELU, GELU_TANH, SILU, RELU_SQUARED, GELU_QUICK, TANH, XIELU };

// An activation and the numbers that some have.
struct Activation {
  ActivationKind kind;
  float limit = 0, up_offset = 0;  // clamp of a gate; a limit of 0: none
  float positive = 0, negative = 0, beta = 0, epsilon = 0;  // of XIELU

  Activation(ActivationKind kind) : kind(kind) {}
  operator ActivationKind() const { return kind; }
};

// Functions of single numbers. It is never inlined, so that all rows get the same bits.
[[gnu::noinline]] inline void activate(float* x, int64_t count, const Activation& activation) {
  const ActivationKind kind = activation.kind;
  for (int64_t i = 0; kind == RELU && i < count; i++) x[i] = x[i] > 0 ? x[i] : 0;
  for (int64_t i = 0; kind == GELU && i < count; i++) x[i] *= 0.5f * (1 + std::erf(x[i] * 0.70710678f));
  for (int64_t i = 0; kind == GELU_TANH && i < count; i++)
    x[i] -= x[i] / (1 + exponential(1.59576912f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
  for (int64_t i = 0; kind == SILU && i < count; i++) x[i] /= 1 + exponential(-x[i]);
  for (int64_t i = 0; kind == RELU_SQUARED && i < count; i++) x[i] = x[i] > 0 ? x[i] * x[i] : 0;
  for (int64_t i = 0; kind == GELU_QUICK && i < count; i++) x[i] /= 1 + exponential(-1.702f * x[i]);
  for (int64_t i = 0; kind == TANH && i < count; i++) x[i] = 1 - 2 / (1 + exponential(2 * x[i]));
  for (int64_t i = 0; kind == XIELU && i < count; i++) {
    const float below = (exponential(std::min(x[i], activation.epsilon)) - 1 - x[i]) * activation.negative;
    x[i] = (x[i] > 0 ? activation.positive * x[i] * x[i] : below) + activation.beta * x[i];
  }
}

// Limit a gate and what it is multiplied with (gpt-oss).
[[gnu::noinline]] inline void clamp_gate(float* gate, float* up, int64_t count, const Activation& activation) {
  const float limit = activation.limit;
  for (int64_t i = 0; i < count; i++) {
    gate[i] = gate[i] > limit ? limit : gate[i];
    up[i] = (up[i] > limit ? limit : up[i] < -limit ? -limit : up[i]) + activation.up_offset;
  }
}
