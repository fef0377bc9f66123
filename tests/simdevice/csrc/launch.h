// Any operator of torch, run by its CPU kernel on sim memory in the order of a sim stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

// The boxed kernel behind every operator without one of its own.
void launch_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
