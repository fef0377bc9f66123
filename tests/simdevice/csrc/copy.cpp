#include "copy.h"

#include "alias.h"

#include <ATen/ops/_local_scalar_dense.h>

namespace sim {

namespace {

// A copy that is ready to run, holding all that it reads and writes.
Queue::Work copy_work(const at::Tensor& from, const at::Tensor& to) {
  const BelowEverything guard;
  Aliases aliases(c10::DeviceType::CPU);
  // The host's side is used as it is, not copied: a source that is overwritten too early is seen too early.
  at::Tensor source = from.is_cpu() ? from.detach() : aliases.of(from);
  at::Tensor target = to.is_cpu() ? to.detach() : aliases.of(to);
  return [source, target] {
    const BelowEverything below;
    target.copy_(source);
  };
}

// Both devices' current streams take part, as on CUDA: the copy runs on the source's stream, after what the target's
// stream was doing with the target; work launched later on either stream comes after the copy.
void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  Queue& source = current_queue(from.device().index());
  Queue& target = current_queue(to.device().index());
  source.wait_for(target.record());
  source.launch(copy_work(from, to), kCopy);
  target.wait_for(source.record());
}

void copy_with_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::Tensor& host = from.is_cpu() ? from : to;
  const at::Tensor& sim = from.is_cpu() ? to : from;
  Queue& queue = current_queue(sim.device().index());
  if (non_blocking && is_pinned(host.storage().data())) {
    queue.launch(copy_work(from, to), kCopy);
  } else {
    // Pageable memory blocks whatever `non_blocking` says: the driver waits for the stream before it stages it.
    queue.launch_and_wait(copy_work(from, to), kCopy);
  }
}

}  // namespace

void copy_tensor(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0 || from.is_same(to)) {
    return;
  }
  if (from.is_cpu() || to.is_cpu()) {
    copy_with_host(from, to, non_blocking);
  } else if (from.device() == to.device()) {
    current_queue(to.device().index()).launch(copy_work(from, to), kKernel);
  } else {
    copy_between_devices(from, to);
  }
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  at::Tensor source;
  {
    const BelowEverything guard;
    source = Aliases(c10::DeviceType::CPU).of(tensor);
  }
  at::Scalar value;
  current_queue(tensor.device().index())
      .launch_and_wait(
          [&] {
            const BelowEverything guard;
            value = at::_local_scalar_dense(source);
          },
          kCopy);
  return value;
}

}  // namespace sim
