// The devices, and what a thread thinks is current.
#include "runtime.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace sim {

namespace {

std::atomic<bool> visible{true};
std::atomic<bool> used{false};
std::atomic<bool> bad_fork{false};

thread_local c10::DeviceIndex tls_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> tls_streams{};

c10::DeviceIndex configured_count() {
  const char* text = std::getenv("SIMDEV_COUNT");
  if (text == nullptr || *text == '\0') {
    return 2;
  }
  char* end = nullptr;
  const long count = std::strtol(text, &end, 10);
  if (*end != '\0' || count < 0 || count > kMaxDevices) {
    return 0;  // the Python side has refused it with a message before it came here
  }
  return static_cast<c10::DeviceIndex>(count);
}

std::vector<std::unique_ptr<Device>>& devices() {
  static auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<Device>>();
    for (c10::DeviceIndex i = 0; i < configured_count(); ++i) {
      made->push_back(std::make_unique<Device>(i));
    }
    // The child has the memory of the streams, but none of their threads. As on CUDA the device cannot be used
    // there, unless the parent had not used it.
    pthread_atfork(nullptr, nullptr, [] { bad_fork = used.load(); });
    return made;
  }();
  return *all;
}

}  // namespace

Device::Device(c10::DeviceIndex i) : index(i) {
  for (c10::StreamId id = 0; id < kStreams; ++id) {
    queues[id] = std::make_unique<Queue>(*this, id);
  }
}

std::chrono::nanoseconds Device::latency(Cost cost) const {
  switch (cost.kind) {
    case Cost::Kind::Kernel:
      return std::chrono::nanoseconds(kernel_latency_ns.load());
    case Cost::Kind::Copy:
      return std::chrono::nanoseconds(copy_latency_ns.load());
    case Cost::Kind::Fixed:
      return cost.fixed;
    case Cost::Kind::None:
      break;
  }
  return std::chrono::nanoseconds(0);
}

void Device::synchronize() {
  for (auto& q : queues) {
    q->synchronize();
  }
}

c10::DeviceIndex device_count() noexcept {
  return visible ? static_cast<c10::DeviceIndex>(devices().size()) : c10::DeviceIndex{0};
}

void set_visible(bool value) noexcept { visible = value; }

Device& device(c10::DeviceIndex index) {
  TORCH_CHECK(
      !bad_fork,
      "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, you must use the 'spawn' "
      "start method");
  auto& all = devices();
  TORCH_CHECK(
      index >= 0 && static_cast<size_t>(index) < all.size(),
      "sim error: invalid device ordinal ",
      static_cast<int>(index),
      ", there are ",
      all.size(),
      " devices");
  used = true;
  return *all[index];
}

Queue& queue(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == kSim, "expected a sim stream, got one of ", stream.device_type());
  TORCH_CHECK(stream.id() >= 0 && stream.id() < kStreams, "sim has no stream ", stream.id());
  return *device(stream.device_index()).queues[stream.id()];
}

Queue& current_queue(c10::DeviceIndex index) { return *device(index).queues[current_stream_id(index)]; }

c10::DeviceIndex current_device() noexcept { return tls_device; }

void set_current_device(c10::DeviceIndex index) {
  device(index);
  tls_device = index;
}

void unchecked_set_current_device(c10::DeviceIndex index) noexcept { tls_device = index; }

c10::StreamId current_stream_id(c10::DeviceIndex index) noexcept { return tls_streams[index]; }

void set_current_stream_id(c10::DeviceIndex index, c10::StreamId id) noexcept { tls_streams[index] = id; }

bool in_bad_fork() noexcept { return bad_fork; }

bool was_used() noexcept { return used; }

void shutdown() {
  if (bad_fork) {
    return;  // the threads are the parent's
  }
  // First all are told to stop, then they are joined: one stream may wait for a marker of another.
  for (auto& d : devices()) {
    for (auto& q : d->queues) {
      q->stop();
    }
  }
  for (auto& d : devices()) {
    for (auto& q : d->queues) {
      q->join();
    }
  }
}

}  // namespace sim
