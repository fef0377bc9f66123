// What Python sees of the simulator.
#include "generator.h"
#include "memory.h"
#include "runtime.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <thread>

namespace sim {

namespace {

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(std::llround(seconds * 1e9)));
}

void launch_sleep(c10::DeviceIndex index, double seconds) {
  current_queue(index).launch([] {}, Cost{Cost::Kind::Fixed, nanoseconds(seconds)});
}

void launch_failure(c10::DeviceIndex index, const std::string& message) {
  current_queue(index).enqueue([message] { TORCH_CHECK(false, message); }, kKernel);
}

// Autograd's device threads ask for the GIL when they start, and when they drop the state of a finished backward,
// which may be after the caller has gone on. One that asks while the interpreter goes is killed inside a noexcept
// function, and the process aborts (1 exit in 20). A last backward on every device waits for them: each thread works
// in order, and this one, started by a thread that Python does not know, leaves nothing that needs the GIL.
void settle_autograd() {
  std::thread([] {
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      try {
        const auto leaf = at::ones({1}, at::TensorOptions(c10::Device(kSim, i))).requires_grad_();
        leaf.sum().backward();
      } catch (const std::exception&) {
        return;  // autograd has no thread for the device: it was started before the simulator was loaded
      }
    }
  }).join();
}

void leave() {
  shutdown();
  if (was_used() && !in_bad_fork()) {
    settle_autograd();
  }
}

Queue& stream(c10::DeviceIndex index, c10::StreamId id) {
  return queue(c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, index), id));
}

void hold(c10::DeviceIndex index, c10::StreamId id) { stream(index, id).hold(); }

void let_go(c10::DeviceIndex index, c10::StreamId id) { stream(index, id).release(); }

std::vector<c10::StreamId> recorded_streams(const at::Tensor& tensor) {
  const auto block = block_of(tensor.storage().data_ptr());
  return block ? block->recorded_streams() : std::vector<c10::StreamId>{};
}

}  // namespace

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  using no_gil = py::call_guard<py::gil_scoped_release>;
  m.attr("streams") = kStreams;
  m.def("device_count", &device_count);
  m.def("set_visible", &set_visible);
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("in_bad_fork", &in_bad_fork);
  m.def("was_used", &was_used);
  m.def("shutdown", &leave, no_gil());
  m.def("set_inline", &set_inline);
  m.def("set_poison", &set_poison);
  m.def("set_kernel_latency", [](c10::DeviceIndex i, double s) { device(i).kernel_latency_ns = nanoseconds(s).count(); });
  m.def("set_copy_latency", [](c10::DeviceIndex i, double s) { device(i).copy_latency_ns = nanoseconds(s).count(); });
  m.def("sleep", &launch_sleep, no_gil());
  m.def("fail", &launch_failure, no_gil());
  m.def("hold", &hold, no_gil());
  m.def("release", &let_go, no_gil());
  m.def("pending", [](c10::DeviceIndex i) {
    return std::count_if(device(i).queues.begin(), device(i).queues.end(), [](auto& q) { return !q->idle(); });
  });
  m.def("memory_limit", [](c10::DeviceIndex i) { return memory_limit(device(i).index); });
  m.def("set_memory_limit", [](c10::DeviceIndex i, int64_t bytes) { set_memory_limit(device(i).index, bytes); });
  m.def("memory_allocated", [](c10::DeviceIndex i) { return memory_stats(device(i).index).allocated; });
  m.def("max_memory_allocated", [](c10::DeviceIndex i) { return memory_stats(device(i).index).peak; });
  m.def("reset_peak", [](c10::DeviceIndex i) { reset_peak(device(i).index); });
  m.def("recorded_streams", &recorded_streams);
  m.def("default_generator", [](c10::DeviceIndex i) { return default_generator(i); });
}
