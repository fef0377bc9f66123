#include "generator.h"

#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <vector>

namespace sim {

namespace {

uint64_t mix(uint64_t x) {  // the finaliser of splitmix64
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  static c10::DeviceType device_type() { return kSim; }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }

  uint64_t next() {
    std::lock_guard<std::mutex> lock(mutex_);
    return mix(mix(seed_) ^ offset_++);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu({kStateBytes}, at::kByte);
    const std::array<uint64_t, 2> words{seed_, offset_};
    std::memcpy(state.mutable_data_ptr(), words.data(), kStateBytes);
    return state.getIntrusivePtr();
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK_TYPE(
        state.dtype() == at::kByte && state.is_cpu() && state.is_contiguous(),
        "RNG state must be a contiguous CPU byte tensor");
    TORCH_CHECK(state.numel() == kStateBytes, "RNG state of sim has ", kStateBytes, " bytes, got ", state.numel());
    std::array<uint64_t, 2> words{};
    std::memcpy(words.data(), state.data(), kStateBytes);
    seed_ = words[0];
    offset_ = words[1];
  }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  static constexpr int64_t kStateBytes = 2 * sizeof(uint64_t);
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex index) { return at::make_generator<GeneratorImpl>(index); }

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < kMaxDevices; ++i) {
      made->push_back(new_generator(i));
    }
    return made;
  }();
  TORCH_CHECK(index >= 0 && index < kMaxDevices, "sim has no generator ", static_cast<int>(index));
  return (*all)[index];
}

at::Generator draw(const at::Generator& generator, c10::DeviceIndex index) {
  const at::Generator& from = generator.defined() ? generator : default_generator(index);
  TORCH_CHECK(
      from.device().type() == kSim,
      "Expected a 'sim' device type for generator but found '",
      from.device().type(),
      "'");
  auto* impl = at::check_generator<GeneratorImpl>(from);
  return at::make_generator<at::CPUGeneratorImpl>(impl->next());
}

}  // namespace sim
