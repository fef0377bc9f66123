#include "traits.h"

#include <shared_mutex>
#include <unordered_map>

namespace sim {

namespace {

bool is_kind(const c10::TypePtr& type, c10::TypeKind kind) {
  if (type->kind() == c10::TypeKind::OptionalType) {
    return is_kind(type->castRaw<c10::OptionalType>()->getElementType(), kind);
  }
  return type->kind() == kind;
}

bool is_tensor_or_list(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::ListType) {
    return is_kind(type->castRaw<c10::ListType>()->getElementType(), c10::TypeKind::TensorType);
  }
  return is_kind(type, c10::TypeKind::TensorType);
}

// The meta kernel of these describes CUDA's results, which have other shapes than the CPU's.
bool misdescribed(const std::string& name) {
  return name == "aten::_embedding_bag" || name == "aten::_embedding_bag_forward_only";
}

OperatorTraits read(const c10::FunctionSchema& schema) {
  OperatorTraits traits;
  traits.can_infer = !misdescribed(schema.name());
  traits.arguments = schema.arguments().size();
  traits.results = schema.returns().size();
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    traits.written.push_back(alias != nullptr && alias->isWrite());
    traits.writes_any |= traits.written.back();
    traits.generators.push_back(is_kind(argument.type(), c10::TypeKind::GeneratorType));
  }
  for (const auto& result : schema.returns()) {
    traits.can_infer &= is_tensor_or_list(result.type());
    traits.returned.emplace_back();
    const auto* alias = result.alias_info();
    if (alias == nullptr || !alias->isWrite()) {
      continue;
    }
    for (size_t i = 0; i < traits.arguments; ++i) {
      const auto* theirs = schema.arguments()[i].alias_info();
      if (theirs != nullptr && theirs->isWrite() && theirs->beforeSets() == alias->beforeSets()) {
        traits.returned.back() = i;
      }
    }
  }
  return traits;
}

}  // namespace

const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
  // Addresses of the values stay the same while others are added, and nothing is ever removed.
  static auto* cache = new std::unordered_map<c10::OperatorName, OperatorTraits>();
  static auto* mutex = new std::shared_mutex();
  {
    std::shared_lock<std::shared_mutex> lock(*mutex);
    const auto found = cache->find(op.operator_name());
    if (found != cache->end()) {
      return found->second;
    }
  }
  OperatorTraits traits = read(op.schema());
  std::unique_lock<std::shared_mutex> lock(*mutex);
  return cache->emplace(op.operator_name(), std::move(traits)).first->second;
}

}  // namespace sim
