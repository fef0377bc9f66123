// The simulated machine: N devices, each with a pool of streams. Nothing in this header knows tensors.
//
// Every object here is created once and never destroyed: stream threads and late tensor deleters may look at them
// while the process is already running static destructors.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace sim {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kMaxDevices = 16;
// Stream 0 is the default one; 1..32 are handed out in turn, and again from 1 after that, as CUDA's pool does.
constexpr c10::StreamId kStreams = 33;

using Clock = std::chrono::steady_clock;

// One point in the work of one stream. It completes once and for ever: recording an event again makes a new Marker,
// so whoever waits for the earlier recording is not moved to the later one.
class Marker {
 public:
  void complete();
  void wait();
  bool done();
  Clock::time_point time();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Clock::time_point time_{};
};

// What an operation costs before it runs: nothing, the device's kernel latency, its copy latency, or a given time.
struct Cost {
  enum class Kind { None, Kernel, Copy, Fixed } kind = Kind::None;
  std::chrono::nanoseconds fixed{0};
};
constexpr Cost kFree{Cost::Kind::None, {}};
constexpr Cost kKernel{Cost::Kind::Kernel, {}};
constexpr Cost kCopy{Cost::Kind::Copy, {}};

struct Device;

// A stream: work runs in the order of `launch`, on the stream's own thread, or on the launching thread when that
// cannot be told apart (nothing queued, nothing to sleep).
class Queue {
 public:
  using Work = std::function<void()>;

  Queue(Device& device, c10::StreamId id) : device_(device), id_(id) {}

  // A failure of `work` is raised here if it ran at once, else by the next synchronisation with this stream.
  void launch(Work work, Cost cost);
  // Never on this thread, so that it cannot block or fail here.
  void enqueue(Work work, Cost cost);
  // Runs `work` in stream order and returns when it is done; a failure is raised here. Lets the GIL go.
  void launch_and_wait(const Work& work, Cost cost);
  std::shared_ptr<Marker> record();
  void wait_for(const std::shared_ptr<Marker>& marker);
  // Blocks until everything launched before this call is done, without the GIL, then raises a pending failure.
  void synchronize();
  void raise_pending();
  bool idle();
  // True if work without cost launched now would run on the calling thread.
  bool runs_inline(Cost cost);

  // Held, the stream starts no further work. Holds add up.
  void hold();
  void release();
  // Drops what is queued and ends the thread. Later launches run on their own thread.
  void stop();
  void join();

  c10::Stream stream() const;

 private:
  struct Item {
    Work work;
    Cost cost;
  };

  void push(std::unique_lock<std::mutex>& lock, Item item);
  bool inline_now(Cost cost) const;
  void serve();
  void execute(Item item);
  void wait_finished(std::unique_lock<std::mutex>& lock, uint64_t ticket);

  Device& device_;
  const c10::StreamId id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  std::thread thread_;
  std::exception_ptr failure_;
  uint64_t submitted_ = 0;
  uint64_t finished_ = 0;
  int holds_ = 0;
  bool busy_ = false;
  bool stopped_ = false;
};

struct Device {
  explicit Device(c10::DeviceIndex index);

  const c10::DeviceIndex index;
  std::atomic<int64_t> kernel_latency_ns{0};
  std::atomic<int64_t> copy_latency_ns{0};
  std::atomic<uint64_t> next_stream{0};
  std::array<std::unique_ptr<Queue>, kStreams> queues;

  std::chrono::nanoseconds latency(Cost cost) const;
  void synchronize();
};

// Number of devices, fixed by SIMDEV_COUNT when the library is loaded; `visible` is false inside `hidden()`.
c10::DeviceIndex device_count() noexcept;
void set_visible(bool visible) noexcept;

// These raise when the index names no device, and in a child forked after the simulator was used.
Device& device(c10::DeviceIndex index);
Queue& queue(const c10::Stream& stream);
Queue& current_queue(c10::DeviceIndex index);

c10::DeviceIndex current_device() noexcept;
void set_current_device(c10::DeviceIndex index);
void unchecked_set_current_device(c10::DeviceIndex index) noexcept;
c10::StreamId current_stream_id(c10::DeviceIndex index) noexcept;
void set_current_stream_id(c10::DeviceIndex index, c10::StreamId id) noexcept;

void set_inline(bool enabled) noexcept;
bool in_bad_fork() noexcept;
bool was_used() noexcept;
void shutdown();

}  // namespace sim
