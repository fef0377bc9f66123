// Operators that torch calls on accelerators only, so that the CPU has no kernel to borrow: dropout with the device's
// random numbers, and the fused cells of LSTM and GRU. Written with sim operators, each of which is one launch.
#include "runtime.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  const double scale = p == 1 ? 0.0 : 1 / (1 - p);
  return {input.mul(mask).mul_(scale), mask};
}

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

Tensor sigmoid_slope(const Tensor& y) { return y * (1 - y); }

Tensor tanh_slope(const Tensor& y) { return 1 - y * y; }

// The workspace is what backward needs: the four gates after their nonlinearity.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& cx,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const Tensor in = gates[0].sigmoid();
  const Tensor forget = gates[1].sigmoid();
  const Tensor cell = gates[2].tanh();
  const Tensor out = gates[3].sigmoid();
  Tensor cy = forget * cx + in * cell;
  Tensor hy = out * cy.tanh();
  return {hy, cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy,
    const OptionalTensor& grad_cy,
    const Tensor& cx,
    const Tensor& cy,
    const Tensor& workspace,
    bool has_bias) {
  const bool has_grad_hy = grad_hy.has_value() && grad_hy->defined();
  const bool has_grad_cy = grad_cy.has_value() && grad_cy->defined();
  if (!has_grad_hy && !has_grad_cy) {
    return {};
  }
  const auto gates = workspace.chunk(4, 1);
  const Tensor& in = gates[0];
  const Tensor& forget = gates[1];
  const Tensor& cell = gates[2];
  const Tensor& out = gates[3];
  const Tensor squashed = cy.tanh();
  const Tensor from_hy = has_grad_hy ? *grad_hy : at::zeros_like(cy);
  Tensor grad = from_hy * out * tanh_slope(squashed);
  if (has_grad_cy) {
    grad = grad + *grad_cy;
  }
  Tensor grad_gates = at::cat(
      {grad * cell * sigmoid_slope(in),
       grad * cx * sigmoid_slope(forget),
       grad * in * tanh_slope(cell),
       from_hy * squashed * sigmoid_slope(out)},
      1);
  return {grad_gates, grad * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

// The workspace: reset and update gate, candidate, previous state, and the candidate's hidden part.
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& hx,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto in = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = (in[0] + hidden[0]).sigmoid();
  const Tensor update = (in[1] + hidden[1]).sigmoid();
  const Tensor candidate = (in[2] + reset * hidden[2]).tanh();
  Tensor hy = candidate + update * (hx - candidate);
  return {hy, at::cat({reset, update, candidate, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const Tensor& reset = saved[0];
  const Tensor& update = saved[1];
  const Tensor& candidate = saved[2];
  const Tensor grad_candidate = grad * (1 - update) * tanh_slope(candidate);
  const Tensor grad_update = grad * (saved[3] - candidate) * sigmoid_slope(update);
  const Tensor grad_reset = grad_candidate * saved[4] * sigmoid_slope(reset);
  Tensor grad_in = at::cat({grad_reset, grad_update, grad_candidate}, 1);
  Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_candidate * reset}, 1);
  return {
      grad_in,
      grad_hidden,
      grad * update,
      has_bias ? grad_in.sum(0) : Tensor(),
      has_bias ? grad_hidden.sum(0) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", native_dropout);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace sim
