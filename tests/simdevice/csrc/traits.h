// What the launcher must know of an operator, read from its schema once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

namespace sim {

struct OperatorTraits {
  size_t arguments = 0;
  size_t results = 0;
  bool writes_any = false;
  // Whether results can be handed out before the kernel ran: they are tensors, and meta tells their shapes right.
  bool can_infer = true;

  bool writes(size_t argument) const { return written[argument]; }
  bool is_generator(size_t argument) const { return generators[argument]; }
  // The argument that this result is, for in-place and out= operators.
  std::optional<size_t> written_result(size_t result) const { return returned[result]; }

  std::vector<bool> written;
  std::vector<bool> generators;
  std::vector<std::optional<size_t>> returned;
};

const OperatorTraits& traits_of(const c10::OperatorHandle& op);

}  // namespace sim
