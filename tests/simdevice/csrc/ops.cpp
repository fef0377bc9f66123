// The operators that need a kernel of their own; all others go to the launcher.
#include "alias.h"
#include "copy.h"
#include "launch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {

namespace {

c10::Device on_sim(std::optional<c10::Device> device, std::optional<c10::Layout> layout, std::optional<bool> pinned) {
  const c10::Device wanted = device.value_or(c10::Device(kSim));
  TORCH_CHECK(
      layout.value_or(c10::kStrided) == c10::kStrided, "sim supports strided tensors only, got ", layout.value());
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  return {kSim, wanted.has_index() ? wanted.index() : current_device()};
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned,
    std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(on_sim(device, layout, pinned));
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned) {
  return empty_sim(size, stride, c10::dtype_or_default(dtype), on_sim(device, layout, pinned).index());
}

// Autograd's zeros without memory. Only torch's own devices may hand out such tensors, so these are real ones.
at::Tensor zeros(
    at::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned) {
  return empty(size, dtype, layout, device, pinned, std::nullopt).zero_();
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (self.sizes() == size && !format.has_value()) {
    return self;
  }
  // Strides of the wanted format, from a tensor without memory.
  const at::Tensor shape = at::detail::empty_meta(size, self.scalar_type(), {}, {}, {}, format);
  resize_tensor(self, size, shape.strides());
  return self;
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

// With a kernel of its own, because torch's would go through _copy_from, whose conjugate fallback clones, which copies.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (src._is_zerotensor()) {
    return self.zero_();
  }
  const auto expanded = at::expand_inplace(self, src, "copy_");
  copy_tensor(*expanded, self, non_blocking);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  at::Tensor to = dst;
  return copy_(to, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return read_scalar(self); }

at::Tensor& set_storage_offset(
    at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device() == self.device(), "set_ of a ", self.device(), " tensor to a storage on ", source.device());
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, count, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) {
    return self;
  }
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), /*resizable=*/true);
  return set_storage_offset(self, std::move(none), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (auto block = block_of(self.storage().data_ptr())) {
    block->record_stream(stream);
  }
}

void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack) { launch_operator(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", zeros);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("record_stream", record_stream);
  // These have a composite kernel, which would look for a kernel of the backend that sim does not have.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&launch>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&launch>());
  // Their out= kernels on the CPU resize the result to the inputs' shape on the way, with a warning.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&launch>());
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&launch>());
}

}  // namespace sim
