// The same memory, seen as a tensor of another device: how the CPU's kernels work on sim tensors, and how shapes
// are inferred without memory at all.
#pragma once

#include "memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <utility>
#include <vector>

namespace sim {

// Aliases made through one object keep the relations of their originals: views of one storage stay views of one
// storage. That is how a view made by a kernel is recognised, and given back as a view of the original.
class Aliases {
 public:
  explicit Aliases(c10::DeviceType target) : target_(target) {}

  // A sim tensor as one of the target device. A CPU tensor (a scalar or an index) as a private copy, or as it is for
  // shape inference.
  at::Tensor of(const at::Tensor& tensor);
  // Whether the tensor lives in the memory of one of the originals; if so `restore` gives a new sim tensor on it.
  bool known(const at::Tensor& made) const;
  at::Tensor restore(const at::Tensor& made) const;
  // A kernel may have resized the alias of an argument that it writes to: the original follows.
  void write_back(const at::Tensor& original, const at::Tensor& alias) const;

 private:
  c10::Storage storage_of(const c10::Storage& original);

  const c10::DeviceType target_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // original, alias
};

at::Tensor empty_sim(at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype, c10::DeviceIndex index);
// A sim tensor that takes over the memory of a CPU tensor.
at::Tensor adopt_tensor(const at::Tensor& cpu, c10::DeviceIndex index);
// Stream-ordered; contents are kept, as by CUDA's resize_.
void resize_tensor(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);

// Kernels run below autograd, autocast, Python modes and inference mode, whatever the launching thread has on.
struct BelowEverything {
  c10::InferenceMode no_inference_mode{false};
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard below_python{c10::python_ks};
};

}  // namespace sim
