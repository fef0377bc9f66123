// Streams and markers: who runs which work, when, on which thread.
#include "gil.h"
#include "runtime.h"

#include <c10/util/Exception.h>

namespace sim {

namespace {

std::atomic<bool> inline_enabled{true};

}  // namespace

void set_inline(bool enabled) noexcept { inline_enabled = enabled; }

void Marker::complete() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (done_) {
      return;
    }
    done_ = true;
    time_ = Clock::now();
  }
  changed_.notify_all();
}

void Marker::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

bool Marker::done() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

Clock::time_point Marker::time() {
  std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

namespace {

// Completes its marker when it goes, run or dropped: a stream that waits for work which shutdown has thrown away
// wakes up and can be joined.
struct Recording {
  explicit Recording(std::shared_ptr<Marker> m) : marker(std::move(m)) {}
  ~Recording() { marker->complete(); }
  std::shared_ptr<Marker> marker;
};

}  // namespace

c10::Stream Queue::stream() const {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device_.index), id_);
}

bool Queue::inline_now(Cost cost) const {
  if (busy_ || !items_.empty()) {
    return false;
  }
  return stopped_ || (inline_enabled && holds_ == 0 && device_.latency(cost).count() == 0);
}

bool Queue::runs_inline(Cost cost) {
  std::lock_guard<std::mutex> lock(mutex_);
  return inline_now(cost);
}

void Queue::push(std::unique_lock<std::mutex>& lock, Item item) {
  TORCH_INTERNAL_ASSERT(lock.owns_lock());
  ++submitted_;
  items_.push_back(std::move(item));
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { serve(); });
  }
  changed_.notify_all();
}

void Queue::launch(Work work, Cost cost) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!inline_now(cost)) {
    push(lock, {std::move(work), cost});
    return;
  }
  ++submitted_;
  // Work that other threads launch meanwhile finds the stream busy and queues up behind this.
  busy_ = true;
  lock.unlock();
  std::exception_ptr failure;
  try {
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  work = nullptr;
  lock.lock();
  busy_ = false;
  ++finished_;
  lock.unlock();
  changed_.notify_all();
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void Queue::enqueue(Work work, Cost cost) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!stopped_) {
    push(lock, {std::move(work), cost});
  }
}

void Queue::launch_and_wait(const Work& work, Cost cost) {
  std::exception_ptr failure;
  bool ran = false;
  launch(
      [&] {
        ran = true;
        try {
          work();
        } catch (...) {
          failure = std::current_exception();
        }
      },
      cost);
  synchronize();
  TORCH_CHECK(ran, "sim was shut down before this work ran");
  if (failure) {
    std::rethrow_exception(failure);
  }
}

std::shared_ptr<Marker> Queue::record() {
  auto marker = std::make_shared<Marker>();
  auto recording = std::make_shared<Recording>(marker);
  launch([recording] { recording->marker->complete(); }, kFree);
  return marker;
}

void Queue::wait_for(const std::shared_ptr<Marker>& marker) {
  if (!marker->done()) {
    // Only the stream waits, the launching thread goes on.
    enqueue([marker] { marker->wait(); }, kFree);
  }
}

void Queue::wait_finished(std::unique_lock<std::mutex>& lock, uint64_t ticket) {
  changed_.wait(lock, [&] { return finished_ >= ticket; });
}

void Queue::synchronize() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t ticket = submitted_;
    if (finished_ < ticket) {
      // The GIL goes before the lock is taken again: a thread must never wait for the GIL while it holds the lock.
      lock.unlock();
      ReleaseGil no_gil;
      lock.lock();
      wait_finished(lock, ticket);
      lock.unlock();
    }
  }
  raise_pending();
}

void Queue::raise_pending() {
  std::exception_ptr failure;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::swap(failure, failure_);
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

bool Queue::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return finished_ == submitted_;
}

void Queue::hold() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++holds_;
}

void Queue::release() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --holds_;
  }
  changed_.notify_all();
}

void Queue::execute(Item item) {
  std::exception_ptr failure;
  try {
    item.work();
  } catch (...) {
    failure = std::current_exception();
  }
  // What the work held is let go before anyone sees it finished, so that memory is free when synchronize returns.
  item.work = nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  busy_ = false;
  ++finished_;
  if (failure && !failure_) {
    failure_ = failure;
  }
}

void Queue::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopped_ || (!busy_ && !items_.empty() && holds_ == 0); });
    if (stopped_) {
      return;
    }
    Item item = std::move(items_.front());
    items_.pop_front();
    busy_ = true;
    const auto latency = device_.latency(item.cost);
    if (latency.count() > 0 && changed_.wait_for(lock, latency, [this] { return stopped_; })) {
      busy_ = false;
      ++finished_;
      return;
    }
    lock.unlock();
    execute(std::move(item));
    changed_.notify_all();
    lock.lock();
  }
}

void Queue::stop() {
  std::deque<Item> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    dropped.swap(items_);
    finished_ += dropped.size();
  }
  changed_.notify_all();
  // `dropped` goes here, outside the lock: the items' destructors complete markers and free memory.
}

void Queue::join() {
  if (thread_.joinable()) {
    thread_.join();
  }
}

}  // namespace sim
