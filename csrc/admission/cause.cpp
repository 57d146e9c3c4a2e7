// SPDX-License-Identifier: Apache-2.0
#include "admission/cause.h"

#include <array>
#include <string>
#include <utility>

#include "core/error.h"

namespace twinpool::admission {

std::string_view name_of(Cause cause) noexcept {
  switch (cause) {
  case Cause::none:
    return "";
  case Cause::duplicate_request:
    return "DUPLICATE_REQUEST";
  case Cause::tenant_concurrency:
    return "TENANT_CONCURRENCY";
  case Cause::tenant_rate:
    return "TENANT_RATE";
  case Cause::exceeds_capacity:
    return "REQUEST_EXCEEDS_CAPACITY";
  case Cause::no_workers:
    return "NO_WORKERS";
  case Cause::deadline_unreachable:
    return "DEADLINE_UNREACHABLE";
  case Cause::queue_full:
    return "QUEUE_FULL";
  case Cause::queue_timeout:
    return "QUEUE_TIMEOUT";
  case Cause::cancelled:
    return "CANCELLED";
  case Cause::deadline_exceeded:
    return "DEADLINE_EXCEEDED";
  case Cause::no_capacity:
    return "NO_CAPACITY";
  case Cause::worker_lost:
    return "WORKER_LOST";
  case Cause::kv_fenced:
    return "KV_FENCED";
  case Cause::transfer_failed:
    return "TRANSFER_FAILED";
  case Cause::invalid_argument:
    return "INVALID_ARGUMENT";
  case Cause::internal:
    return "INTERNAL";
  }
  return "";
}

namespace {

using Row = std::pair<std::string_view, Failure>;
constexpr std::array k_failures{
    Row{"UNSPECIFIED", {Cause::internal, false, false}},
    Row{"NO_CAPACITY", {Cause::no_capacity, true, true}},
    Row{"NOT_SERVING", {Cause::worker_lost, true, true, false}},
    Row{"FENCED", {Cause::kv_fenced, true, true}},
    Row{"TRANSFER", {Cause::transfer_failed, true, true}},
    Row{"PEER_LOST", {Cause::worker_lost, true, true}},
    Row{"INVALID", {Cause::invalid_argument, false, true}},
    Row{"INTERNAL", {Cause::internal, true, false}},
    Row{"DEADLINE", {Cause::deadline_exceeded, false, true}},
    Row{"DUPLICATE", {Cause::duplicate_request, false, true}},
};

}  // namespace

Failure parse_failure(std::string_view reason) {
  constexpr std::string_view prefix = "FAILURE_REASON_";
  if (reason.starts_with(prefix)) {
    reason.remove_prefix(prefix.size());
  }
  for (const auto& [name, failure] : k_failures) {
    if (name == reason) {
      return failure;
    }
  }
  std::string all;
  for (const auto& row : k_failures) {
    all += (all.empty() ? "" : ", ") + std::string(row.first);
  }
  throw CoreError("unknown failure reason " + std::string(reason) + "; allowed: " + all);
}

}  // namespace twinpool::admission
