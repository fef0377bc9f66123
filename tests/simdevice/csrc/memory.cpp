#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>

namespace sim {

namespace {

constexpr int64_t kDefaultLimit = int64_t{16} << 30;

struct Account {
  std::atomic<int64_t> limit{kDefaultLimit};
  std::atomic<int64_t> allocated{0};
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> deferred{0};  // of `allocated`: freed by their owner, but a recorded stream is not through
  std::atomic<int64_t> allocations{0};
  std::atomic<int64_t> ooms{0};
};

Account& account(c10::DeviceIndex index) {
  static auto* all = new std::array<Account, kMaxDevices>();
  return (*all)[index];
}

std::atomic<bool> poison{true};

bool try_take(Account& a, int64_t bytes) {
  int64_t now = a.allocated;
  do {
    if (now + bytes > a.limit) {
      return false;
    }
  } while (!a.allocated.compare_exchange_weak(now, now + bytes));
  int64_t peak = a.peak;
  while (peak < now + bytes && !a.peak.compare_exchange_weak(peak, now + bytes)) {
  }
  ++a.allocations;
  return true;
}

std::string readable(int64_t bytes) {
  double size = static_cast<double>(bytes);
  const char* unit = "bytes";
  for (const char* larger : {"KiB", "MiB", "GiB"}) {
    if (size < 1024) {
      break;
    }
    size /= 1024;
    unit = larger;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f %s", size, unit);
  return text.data();
}

void take(c10::DeviceIndex index, int64_t bytes) {
  Account& a = account(index);
  if (try_take(a, bytes)) {
    return;
  }
  if (a.deferred > 0) {
    device(index).synchronize();
    if (try_take(a, bytes)) {
      return;
    }
  }
  ++a.ooms;
  const int64_t limit = a.limit;
  const int64_t used = a.allocated;
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      false,
      "sim out of memory. Tried to allocate ",
      readable(bytes),
      ". sim:",
      static_cast<int>(index),
      " has a total capacity of ",
      readable(limit),
      " of which ",
      readable(std::max<int64_t>(limit - used, 0)),
      " is free.");
}

// Gives a freed block's bytes back to the account when the last stream that used it is through.
struct Release {
  explicit Release(std::shared_ptr<Block> b) : block(std::move(b)) {}
  ~Release() {
    Account& a = account(block->allocated_on.device_index());
    a.allocated -= static_cast<int64_t>(block->bytes);
    if (deferred) {
      a.deferred -= static_cast<int64_t>(block->bytes);
    }
  }
  Release(const Release&) = delete;
  Release& operator=(const Release&) = delete;
  std::shared_ptr<Block> block;
  bool deferred = false;
};

using Handle = std::shared_ptr<Block>;

void release_on_streams(const std::shared_ptr<Block>& block) {
  auto release = std::make_shared<Release>(block);
  auto& home = queue(block->allocated_on);
  const auto streams = block->recorded_streams();
  if (!streams.empty()) {
    account(block->allocated_on.device_index()).deferred += static_cast<int64_t>(block->bytes);
    release->deferred = true;
  }
  std::vector<std::shared_ptr<Marker>> uses;
  for (const auto id : streams) {
    auto& user = queue(c10::Stream(c10::Stream::UNSAFE, block->allocated_on.device(), id));
    user.launch([release] {}, kFree);
    uses.push_back(user.record());
  }
  if (poison) {
    for (const auto& use : uses) {
      home.wait_for(use);
    }
    home.launch([block] { std::memset(block->data, 0xff, block->bytes); }, kFree);
  }
}

// A deleter must not raise, nor take the locks of streams whose threads stayed in the parent.
void release(void* context) {
  std::unique_ptr<Handle> handle(static_cast<Handle*>(context));
  if (in_bad_fork()) {
    return;
  }
  try {
    release_on_streams(*handle);
  } catch (const std::exception& e) {
    TORCH_WARN("sim could not free memory in stream order: ", e.what());
  }
}

c10::DataPtr make_data_ptr(c10::Storage cpu, c10::DeviceIndex index) {
  const c10::Device dev(kSim, index);
  const auto bytes = static_cast<int64_t>(cpu.nbytes());
  if (bytes == 0) {
    return {nullptr, dev};
  }
  const c10::Stream stream = current_queue(index).stream();
  take(index, bytes);
  auto handle = std::make_unique<Handle>(std::make_shared<Block>(stream, std::move(cpu)));
  void* data = (*handle)->data;
  TORCH_INTERNAL_ASSERT(data != nullptr, "a CPU storage of ", bytes, " bytes without memory");
  return {data, handle.release(), &release, dev};
}

c10::Storage cpu_storage(size_t bytes) {
  const auto size = static_cast<int64_t>(bytes);
  return {c10::Storage::use_byte_size_t(), size, c10::GetCPUAllocator(), /*resizable=*/false};
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return make_data_ptr(cpu_storage(bytes), current_device()); }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    current_queue(current_device()).launch_and_wait([=] { std::memcpy(to, from, bytes); }, kKernel);
  }

  bool initialized() override { return was_used(); }

  void emptyCache(c10::MempoolId_t /*pool*/) override {}

  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (auto block = block_of(ptr)) {
      block->record_stream(stream);
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const MemoryStats now = memory_stats(index);
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = now.allocated;
      (*bytes)[0].peak = now.peak;
    }
    stats.num_ooms = now.ooms;
    stats.num_device_alloc = now.allocations;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    account(index).allocations = 0;
    account(index).ooms = 0;
  }

  void resetPeakStats(c10::DeviceIndex index) override { reset_peak(index); }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const int64_t limit = account(index).limit;
    const int64_t free = std::max<int64_t>(limit - account(index).allocated, 0);
    return {static_cast<size_t>(free), static_cast<size_t>(limit)};
  }
};

// Page-locked memory is ordinary memory whose addresses are written down. Copies keep the storage, so that nothing
// has to be recorded for streams.
struct PinnedRanges {
  std::mutex mutex;
  std::map<const char*, size_t> ranges;
};

PinnedRanges& pinned() {
  static auto* ranges = new PinnedRanges();
  return *ranges;
}

void release_pinned(void* data) {
  if (!in_bad_fork()) {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().ranges.erase(static_cast<const char*>(data));
  }
  c10::free_cpu(data);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    }
    void* data = c10::alloc_cpu(bytes);
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().ranges[static_cast<const char*>(data)] = bytes;
    return {data, data, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void* /*data*/, void* /*context*/, c10::Stream /*stream*/) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory();
  return *memory;
}

PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory();
  return *memory;
}

const bool registered = [] {
  c10::SetAllocator(kSim, &device_memory());
  at::setHostAllocator(kSim, &pinned_memory());
  return true;
}();

}  // namespace

Block::Block(c10::Stream stream, c10::Storage cpu)
    : data(cpu.mutable_data()), bytes(cpu.nbytes()), allocated_on(stream), owner(std::move(cpu)) {}

void Block::record_stream(const c10::Stream& stream) {
  if (stream == allocated_on || stream.device() != allocated_on.device()) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(recorded_.begin(), recorded_.end(), stream.id()) == recorded_.end()) {
    recorded_.push_back(stream.id());
  }
}

std::vector<c10::StreamId> Block::recorded_streams() {
  std::lock_guard<std::mutex> lock(mutex_);
  return recorded_;
}

c10::Allocator* allocator() { return &device_memory(); }

c10::DataPtr adopt(const c10::Storage& cpu) { return make_data_ptr(cpu, current_device()); }

std::shared_ptr<Block> block_of(const c10::DataPtr& ptr) {
  auto* handle = ptr.cast_context<Handle>(&release);
  return handle == nullptr ? nullptr : *handle;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const auto index = storage.device().index();
  c10::DataPtr fresh = make_data_ptr(cpu_storage(bytes), index);
  const auto from = block_of(storage.data_ptr());
  const auto to = block_of(fresh);
  if (from && to) {
    const size_t kept = std::min(from->bytes, to->bytes);
    current_queue(index).launch([from, to, kept] { std::memcpy(to->data, from->data, kept); }, kKernel);
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

MemoryStats memory_stats(c10::DeviceIndex index) {
  const Account& a = account(index);
  return {a.allocated, a.peak, a.allocations, a.ooms};
}

void reset_peak(c10::DeviceIndex index) { account(index).peak = account(index).allocated.load(); }

int64_t memory_limit(c10::DeviceIndex index) { return account(index).limit; }

void set_memory_limit(c10::DeviceIndex index, int64_t bytes) { account(index).limit = bytes; }

void set_poison(bool enabled) noexcept { poison = enabled; }

c10::Allocator* pinned_allocator() { return &pinned_memory(); }

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto after = pinned().ranges.upper_bound(static_cast<const char*>(data));
  if (after == pinned().ranges.begin()) {
    return false;
  }
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

}  // namespace sim
