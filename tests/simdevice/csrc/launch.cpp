// How an operator without a sim kernel runs. Two ways:
//
// - Asynchronous: the operator runs on meta tensors first, which gives the shapes of its results; the results are
//   allocated, the CPU kernel is queued, and the caller goes on.
// - Waiting: the CPU kernel runs in stream order while the caller waits, and its results are taken over. So run
//   operators whose results are not tensors or whose shapes depend on data, those without a meta kernel, and
//   everything while the stream is idle and free of latency, where nobody can tell.
#include "launch.h"

#include "alias.h"
#include "generator.h"
#include "traits.h"

#include <c10/core/DeviceGuard.h>

namespace sim {

namespace {

using torch::jit::Stack;

// Every tensor in an argument, with a flag for "is an index of indexing": those may live on the CPU.
template <typename F>
void for_each_tensor(const c10::IValue& value, const F& visit) {
  if (value.isTensor()) {
    visit(value.toTensor(), false);
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) {
      visit(t, false);
    }
  } else if (value.isOptionalTensorList()) {
    for (const auto& t : value.toOptionalTensorList().vec()) {
      if (t.has_value()) {
        visit(*t, true);
      }
    }
  }
}

c10::IValue translate(const c10::IValue& value, Aliases& aliases, c10::DeviceType target) {
  if (value.isTensor()) {
    return aliases.of(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) {
      list.push_back(aliases.of(t));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& t : value.toOptionalTensorList().vec()) {
      list.push_back(t.has_value() ? std::make_optional(aliases.of(*t)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice()) {
    return c10::Device(target);
  }
  return value;
}

class Launch {
 public:
  Launch(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), traits_(traits_of(op)), arguments_(torch::jit::last(stack, traits_.arguments).vec()) {
    check_devices();
  }

  Stack run() {
    const c10::DeviceGuard guard(c10::Device(kSim, device_));
    Queue& queue = current_queue(device_);
    if (!queue.runs_inline(kKernel) && traits_.can_infer) {
      if (auto results = infer()) {
        return enqueue(queue, std::move(*results));
      }
    }
    return run_and_wait(queue);
  }

 private:
  // One result of shape inference: a view of an argument's memory, an argument itself, or something to allocate.
  struct Results {
    Stack values;                    // what the caller gets
    std::vector<at::Tensor> outputs;  // per result: what the kernel must fill, undefined if nothing
    bool only_views = true;
  };

  void check_devices();
  void check_same_device(const at::Tensor& tensor, bool is_index, size_t argument);
  Stack aliased_arguments(Aliases& aliases, c10::DeviceType target) const;
  void write_back(const Aliases& aliases, const Stack& aliased) const;
  std::optional<Results> infer();
  void allocate(const c10::IValue& meta, const Aliases& aliases, Results& results) const;
  c10::IValue allocate_one(const at::Tensor& meta, const Aliases& aliases, Results& results) const;
  Stack enqueue(Queue& queue, Results results);
  Stack run_and_wait(Queue& queue);
  c10::IValue take_over(const c10::IValue& made, const Aliases& aliases) const;

  const c10::OperatorHandle& op_;
  const OperatorTraits& traits_;
  const Stack arguments_;
  std::optional<c10::Device> first_;
  c10::DeviceIndex device_ = -1;
};

void Launch::check_devices() {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    for_each_tensor(arguments_[i], [&](const at::Tensor& t, bool is_index) {
      if (t.defined()) {
        check_same_device(t, is_index, i);
      }
    });
  }
  if (device_ >= 0) {
    return;
  }
  for (const auto& value : arguments_) {  // a factory: no tensor, but perhaps a device
    if (value.isDevice() && value.toDevice().has_index()) {
      device_ = value.toDevice().index();
    }
  }
  if (device_ < 0) {
    device_ = current_device();
  }
}

void Launch::check_same_device(const at::Tensor& tensor, bool is_index, size_t argument) {
  const c10::Device found = tensor.device();
  const bool scalar = found.is_cpu() && tensor.dim() == 0 && !traits_.writes(argument);
  if (scalar || (is_index && found.is_cpu())) {
    return;
  }
  if (!first_.has_value()) {
    first_ = found;
  }
  TORCH_CHECK(
      *first_ == found,
      "Expected all tensors to be on the same device, but found at least two devices, ",
      *first_,
      " and ",
      found,
      "! (when checking argument for argument ",
      op_.schema().arguments()[argument].name(),
      " in method wrapper_sim_",
      op_.operator_name().name.substr(op_.operator_name().name.rfind(':') + 1),
      ")");
  if (found.type() == kSim) {
    device_ = found.index();
  }
}

Stack Launch::aliased_arguments(Aliases& aliases, c10::DeviceType target) const {
  Stack stack;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!traits_.is_generator(i)) {
      stack.push_back(translate(arguments_[i], aliases, target));
    } else if (target == c10::DeviceType::CPU) {
      stack.emplace_back(draw(arguments_[i].isGenerator() ? arguments_[i].toGenerator() : at::Generator(), device_));
    } else {
      stack.emplace_back();
    }
  }
  return stack;
}

void Launch::write_back(const Aliases& aliases, const Stack& aliased) const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (traits_.writes(i) && arguments_[i].isTensor() && arguments_[i].toTensor().defined()) {
      aliases.write_back(arguments_[i].toTensor(), aliased[i].toTensor());
    }
  }
}

c10::IValue Launch::allocate_one(const at::Tensor& meta, const Aliases& aliases, Results& results) const {
  results.outputs.emplace_back();
  if (!meta.defined()) {
    return meta;
  }
  if (aliases.known(meta)) {
    return aliases.restore(meta);
  }
  results.only_views = false;
  at::Tensor made = empty_sim(meta.sizes(), meta.strides(), meta.scalar_type(), device_);
  results.outputs.back() = made;
  return made;
}

void Launch::allocate(const c10::IValue& meta, const Aliases& aliases, Results& results) const {
  if (meta.isTensor()) {
    results.values.push_back(allocate_one(meta.toTensor(), aliases, results));
    return;
  }
  c10::List<at::Tensor> list;
  for (const at::Tensor& t : meta.toTensorVector()) {
    list.push_back(allocate_one(t, aliases, results).toTensor());
  }
  results.values.emplace_back(std::move(list));
}

std::optional<Launch::Results> Launch::infer() {
  Aliases aliases(c10::DeviceType::Meta);
  Stack aliased;
  Stack made;
  try {
    const BelowEverything guard;
    aliased = aliased_arguments(aliases, c10::DeviceType::Meta);
    made = aliased;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &made);
  } catch (...) {
    // No meta kernel, or a shape that depends on data, or wrong arguments. The CPU kernel will say which.
    return std::nullopt;
  }
  write_back(aliases, aliased);
  Results results;
  results.only_views = !traits_.writes_any && traits_.results > 0;
  for (size_t i = 0; i < traits_.results; ++i) {
    if (const auto argument = traits_.written_result(i)) {
      results.values.push_back(arguments_[*argument]);
      for_each_tensor(arguments_[*argument], [&](const at::Tensor&, bool) { results.outputs.emplace_back(); });
    } else {
      allocate(made[i], aliases, results);
    }
  }
  return results;
}

// Results of the CPU kernel go to where the caller already looks for them.
void fill(const Stack& made, const std::vector<at::Tensor>& outputs) {
  size_t next = 0;
  for (const auto& value : made) {
    for_each_tensor(value, [&](const at::Tensor& t, bool) {
      const at::Tensor& output = outputs[next++];
      if (!output.defined() || !t.defined()) {
        return;
      }
      // Some CPU kernels leave a result empty that no one reads (the saved statistics of an evaluated batch norm).
      if (t.numel() == 0 && output.numel() != 0) {
        output.zero_();
      } else {
        TORCH_CHECK(
            t.sizes() == output.sizes(), "sim inferred shape ", output.sizes(), " for a result of shape ", t.sizes());
        output.copy_(t);
      }
    });
  }
}

struct Kernel {
  c10::OperatorHandle op;
  Stack stack;
  std::vector<at::Tensor> outputs;
  std::vector<std::pair<at::Tensor, const void*>> written;  // arguments, and where their memory is

  void run() {
    const BelowEverything guard;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    for (const auto& [tensor, memory] : written) {
      TORCH_CHECK(tensor.storage().data() == memory, "sim: the CPU kernel resized what shape inference did not");
    }
    fill(stack, outputs);
  }
};

Stack Launch::enqueue(Queue& queue, Results results) {
  if (results.only_views) {
    return std::move(results.values);
  }
  auto kernel = std::make_shared<Kernel>(Kernel{op_, {}, {}, {}});
  {
    const BelowEverything guard;
    Aliases aliases(c10::DeviceType::CPU);
    kernel->stack = aliased_arguments(aliases, c10::DeviceType::CPU);
    for (const auto& output : results.outputs) {
      kernel->outputs.push_back(aliases.of(output));
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (traits_.writes(i) && arguments_[i].isTensor() && arguments_[i].toTensor().defined()) {
        const at::Tensor& alias = kernel->stack[i].toTensor();
        kernel->written.emplace_back(alias, alias.storage().data());
      }
    }
  }
  queue.launch([kernel] { kernel->run(); }, kKernel);
  return std::move(results.values);
}

c10::IValue Launch::take_over(const c10::IValue& made, const Aliases& aliases) const {
  const auto one = [&](const at::Tensor& t) {
    if (!t.defined()) {
      return t;
    }
    return aliases.known(t) ? aliases.restore(t) : adopt_tensor(t, device_);
  };
  if (made.isTensor()) {
    return one(made.toTensor());
  }
  if (made.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : made.toTensorVector()) {
      list.push_back(one(t));
    }
    return list;
  }
  return made;
}

Stack Launch::run_and_wait(Queue& queue) {
  Aliases aliases(c10::DeviceType::CPU);
  Stack aliased;
  Stack made;
  {
    const BelowEverything guard;
    aliased = aliased_arguments(aliases, c10::DeviceType::CPU);
  }
  queue.launch_and_wait(
      [&] {
        const BelowEverything guard;
        made = aliased;
        op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &made);
      },
      kKernel);
  write_back(aliases, aliased);
  Stack results;
  for (size_t i = 0; i < traits_.results; ++i) {
    const auto argument = traits_.written_result(i);
    results.push_back(argument ? arguments_[*argument] : take_over(made[i], aliases));
  }
  return results;
}

}  // namespace

void launch_operator(const c10::OperatorHandle& op, Stack* stack) {
  Stack results = Launch(op, *stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& value : results) {
    stack->push_back(std::move(value));
  }
}

}  // namespace sim
