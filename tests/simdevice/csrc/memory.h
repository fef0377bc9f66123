// Device memory (host memory with a limit and an account) and pinned host memory.
#pragma once

#include "runtime.h"

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <memory>
#include <mutex>
#include <vector>

namespace sim {

// The bytes behind a storage. Work that is queued shares in the Block, so the bytes stay readable until it ran; the
// *account* lets them go earlier, when the last tensor goes, as CUDA's caching allocator does.
struct Block {
  void* data = nullptr;
  size_t bytes = 0;
  c10::Stream allocated_on;
  c10::Storage owner;  // the CPU storage whose memory this is

  Block(c10::Stream stream, c10::Storage cpu);
  void record_stream(const c10::Stream& stream);
  std::vector<c10::StreamId> recorded_streams();

 private:
  std::mutex mutex_;
  std::vector<c10::StreamId> recorded_;
};

// The allocator that torch asks for PrivateUse1.
c10::Allocator* allocator();
// Device memory of the current device that holds what the CPU storage holds, without a copy.
c10::DataPtr adopt(const c10::Storage& cpu);
// The block of a sim storage; null if the storage has no bytes.
std::shared_ptr<Block> block_of(const c10::DataPtr& ptr);
// Stream-ordered on the current stream, contents kept.
void resize_storage(const c10::Storage& storage, size_t bytes);

struct MemoryStats {
  int64_t allocated = 0;
  int64_t peak = 0;
  int64_t allocations = 0;
  int64_t ooms = 0;
};
MemoryStats memory_stats(c10::DeviceIndex index);
void reset_peak(c10::DeviceIndex index);
int64_t memory_limit(c10::DeviceIndex index);
void set_memory_limit(c10::DeviceIndex index, int64_t bytes);
// Freed memory is overwritten with 0xff bytes (NaN, -1) in the order of the stream it was allocated on: as if that
// stream had reused it at once. A reader on another stream that is not ordered by record_stream then reads NaN.
void set_poison(bool enabled) noexcept;

c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

}  // namespace sim
