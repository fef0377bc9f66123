// What torch itself asks of a device: the current device and stream, events, and the accelerator hooks.
#include "generator.h"
#include "gil.h"
#include "memory.h"
#include "runtime.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

namespace sim {

namespace {

// torch holds an event as a void*. It is empty until it is recorded, and is shared with nobody: work that waits
// keeps the marker, not the event.
struct Event {
  explicit Event(bool with_timing) : timing(with_timing) {}
  const bool timing;
  std::shared_ptr<Marker> marker;
  c10::Stream stream{c10::Stream::DEFAULT, c10::Device(kSim, 0)};
};

Event& event_of(void* event) { return *static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }

  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::Device before = getDevice();
    setDevice(d);
    return before;
  }

  c10::Device getDevice() const override { return {kSim, current_device()}; }

  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.type() == kSim, "expected a sim device, got ", d);
    if (d.has_index()) {
      set_current_device(d.index());
    }
  }

  void uncheckedSetDevice(c10::Device d) const noexcept override { unchecked_set_current_device(d.index()); }

  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device d) const override { return current_queue(index_of(d)).stream(); }

  c10::Stream getDefaultStream(c10::Device d) const override { return device(index_of(d)).queues[0]->stream(); }

  c10::Stream getNewStream(c10::Device d, int /*priority*/) const override {
    Device& on = device(index_of(d));
    return on.queues[1 + on.next_stream++ % (kStreams - 1)]->stream();
  }

  c10::Stream getStreamFromGlobalPool(c10::Device d, bool /*high_priority*/) const override {
    return getNewStream(d, 0);
  }

  c10::Stream exchangeStream(c10::Stream s) const override {
    queue(s);
    const c10::Stream before = getStream(s.device());
    set_current_stream_id(s.device_index(), s.id());
    return before;
  }

  void* getStreamNativeHandle(const c10::Stream s) const override { return &queue(s); }

  bool queryStream(const c10::Stream& s) const override {
    Queue& q = queue(s);
    if (!q.idle()) {
      return false;
    }
    q.raise_pending();
    return true;
  }

  void synchronizeStream(const c10::Stream& s) const override { queue(s).synchronize(); }

  void synchronizeDevice(const c10::DeviceIndex index) const override { device(index).synchronize(); }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex index, const c10::EventFlag flag)
      const override {
    TORCH_CHECK(
        index == -1 || index == s.device_index(),
        "Event device index ",
        static_cast<int>(index),
        " does not match recording stream's device index ",
        static_cast<int>(s.device_index()));
    if (*event == nullptr) {
      *event = new Event(flag == c10::EventFlag::BACKEND_DEFAULT);
    }
    Event& e = event_of(*event);
    e.marker = queue(s).record();
    e.stream = s;
  }

  void block(void* event, const c10::Stream& s) const override {
    if (event != nullptr) {
      queue(s).wait_for(event_of(event).marker);
    }
  }

  bool queryEvent(void* event) const override { return event == nullptr || event_of(event).marker->done(); }

  void synchronizeEvent(void* event) const override {
    if (event == nullptr) {
      return;
    }
    const auto marker = event_of(event).marker;
    if (!marker->done()) {
      ReleaseGil no_gil;
      marker->wait();
    }
    queue(event_of(event).stream).raise_pending();
  }

  void destroyEvent(void* event, const c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Event*>(event);
  }

  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*index*/) const override {
    TORCH_CHECK(
        first != nullptr && second != nullptr,
        "Both events must be recorded before calculating elapsed time.");
    Event& a = event_of(first);
    Event& b = event_of(second);
    TORCH_CHECK(a.timing && b.timing, "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(
        a.marker->done() && b.marker->done(), "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(b.marker->time() - a.marker->time()).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& s) const override {
    if (auto block = block_of(ptr)) {
      block->record_stream(s);
    }
  }

 private:
  static c10::DeviceIndex index_of(c10::Device d) { return d.has_index() ? d.index() : current_device(); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return was_used(); }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex before = current_device();
    set_current_device(index);
    return before;
  }

  // A negative index means "leave it", as in CUDA's hooks.
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchangeDevice(index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? current_device() : index);
  }

  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index < 0 ? current_device() : index);
  }

  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

[[maybe_unused]] const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

}  // namespace sim
