#include "alias.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/clone.h>
#include <c10/core/DeviceGuard.h>

namespace sim {

namespace {

using SharedBlock = std::shared_ptr<Block>;

void drop_block(void* context) { delete static_cast<SharedBlock*>(context); }

// The alias holds the Block and not the storage: the last tensor may go, and be accounted as freed, while queued
// work still reads the bytes.
c10::DataPtr cpu_pointer(const c10::Storage& original) {
  auto block = block_of(original.data_ptr());
  if (!block) {
    return {nullptr, c10::Device(c10::DeviceType::CPU)};
  }
  void* data = block->data;
  return {data, new SharedBlock(std::move(block)), &drop_block, c10::Device(c10::DeviceType::CPU)};
}

at::Tensor tensor_on(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return made;
}

}  // namespace

c10::Storage Aliases::storage_of(const c10::Storage& original) {
  for (const auto& [theirs, ours] : storages_) {
    if (theirs.unsafeGetStorageImpl() == original.unsafeGetStorageImpl()) {
      return ours;
    }
  }
  const bool meta = target_ == c10::DeviceType::Meta;
  c10::DataPtr data =
      meta ? c10::DataPtr(nullptr, c10::Device(c10::DeviceType::Meta)) : cpu_pointer(original);
  c10::Storage alias(
      c10::Storage::use_byte_size_t(),
      original.nbytes(),
      std::move(data),
      c10::GetAllocator(target_),
      /*resizable=*/true);
  storages_.emplace_back(original, alias);
  return alias;
}

at::Tensor Aliases::of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  const bool meta = target_ == c10::DeviceType::Meta;
  if (tensor.device().type() == kSim) {
    TORCH_CHECK(tensor.layout() == at::kStrided, "sim supports strided tensors only, got ", tensor.layout());
    const auto key = meta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
    return tensor_on(storage_of(tensor.storage()), tensor, key);
  }
  if (meta) {
    return tensor;  // Python's meta kernels read the value of a number
  }
  // The value at launch: the caller may overwrite its scalar before the kernel runs.
  at::Tensor made = at::clone(tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {  // a Python number: decides how types promote
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

bool Aliases::known(const at::Tensor& made) const {
  for (const auto& [theirs, ours] : storages_) {
    if (ours.unsafeGetStorageImpl() == made.storage().unsafeGetStorageImpl()) {
      return true;
    }
  }
  return false;
}

at::Tensor Aliases::restore(const at::Tensor& made) const {
  for (const auto& [theirs, ours] : storages_) {
    if (ours.unsafeGetStorageImpl() == made.storage().unsafeGetStorageImpl()) {
      return tensor_on(theirs, made, c10::DispatchKey::PrivateUse1);
    }
  }
  TORCH_INTERNAL_ASSERT(false, "restore of a tensor that is no alias");
}

void Aliases::write_back(const at::Tensor& original, const at::Tensor& alias) const {
  if (!original.defined() || original.device().type() != kSim) {
    return;
  }
  // A resized CPU alias has moved to memory of its own, with what the kernel wrote.
  if (target_ == c10::DeviceType::CPU) {
    const auto block = block_of(original.storage().data_ptr());
    if (alias.storage().data() != (block ? block->data : nullptr)) {
      const c10::DeviceGuard guard(original.device());
      original.storage().set_data_ptr_noswap(adopt(alias.storage()));
      original.storage().set_nbytes(alias.storage().nbytes());
    }
    if (original.sizes() != alias.sizes() || original.strides() != alias.strides()) {
      original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  } else if (original.sizes() != alias.sizes() || original.strides() != alias.strides()) {
    resize_tensor(original, alias.sizes(), alias.strides());
  }
}

at::Tensor empty_sim(at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype, c10::DeviceIndex index) {
  const c10::DeviceGuard guard(c10::Device(kSim, index));
  return at::detail::empty_strided_generic(
      sizes, strides, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

at::Tensor adopt_tensor(const at::Tensor& cpu, c10::DeviceIndex index) {
  TORCH_CHECK(
      cpu.device().is_cpu() && cpu.layout() == at::kStrided,
      "sim supports strided tensors only, a kernel made one of layout ",
      cpu.layout());
  const c10::DeviceGuard guard(c10::Device(kSim, index));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), cpu.storage().nbytes(), adopt(cpu.storage()), allocator(), /*resizable=*/true);
  return tensor_on(storage, cpu, c10::DispatchKey::PrivateUse1);
}

void resize_tensor(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const size_t offset = tensor.storage_offset();
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, tensor.dtype().itemsize(), offset);
  if (bytes > tensor.storage().nbytes()) {
    TORCH_CHECK(tensor.storage().resizable(), "Trying to resize storage that is not resizable");
    resize_storage(tensor.storage(), bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

}  // namespace sim
