// SPDX-License-Identifier: Apache-2.0
#include "admission/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <variant>

#include "core/error.h"

namespace twinpool::admission {

namespace {

struct Field {
  std::string_view name;
  std::variant<std::int64_t AdmissionConfig::*, double AdmissionConfig::*> member;
  double least;
  double most;
};

using C = AdmissionConfig;
constexpr double k_many = 1e15;
constexpr double k_day = 86400.0;

constexpr std::array k_fields{
    Field{"max_queue_requests", &C::max_queue_requests, 0, k_many},
    Field{"max_queue_tokens", &C::max_queue_tokens, 0, k_many},
    Field{"max_queue_bytes", &C::max_queue_bytes, 0, k_many},
    Field{"queue_ttl_seconds", &C::queue_ttl_seconds, 1e-3, k_day},
    Field{"ageing_seconds", &C::ageing_seconds, 1e-3, k_day},
    Field{"order_stretch", &C::order_stretch, 0, 1000},
    Field{"max_bypass", &C::max_bypass, 0, k_many},
    Field{"max_attempts", &C::max_attempts, 1, 1000},
    Field{"max_resumes", &C::max_resumes, 0, 1000},
    Field{"max_refusals", &C::max_refusals, 0, k_many},
    Field{"retry_backoff_seconds", &C::retry_backoff_seconds, 0, k_day},
    Field{"refusal_backoff_seconds", &C::refusal_backoff_seconds, 1e-3, k_day},
    Field{"max_tenant_requests", &C::max_tenant_requests, 0, k_many},
    Field{"tenant_tokens_per_second", &C::tenant_tokens_per_second, 0, k_many},
    Field{"tenant_burst_tokens", &C::tenant_burst_tokens, 0, k_many},
    Field{"tenant_max_priority", &C::tenant_max_priority, -100, 100},
    Field{"prefill_window_tokens", &C::prefill_window_tokens, 0, k_many},
    Field{"transfer_window_requests", &C::transfer_window_requests, 0, k_many},
    Field{"refuse_without_workers", &C::refuse_without_workers, 0, 1},
    Field{"early_rejection", &C::early_rejection, 0, 1},
    Field{"preemption", &C::preemption, 0, 1},
    Field{"preemption_grace_seconds", &C::preemption_grace_seconds, 0, k_day},
    Field{"expected_output_ratio", &C::expected_output_ratio, 0, 1},
    Field{"harm_weight", &C::harm_weight, 0, 1000},
    Field{"prefix_fetch", &C::prefix_fetch, 0, 1},
    Field{"local_prefill", &C::local_prefill, 0, 1},
    Field{"prior_prefill_seconds", &C::prior_prefill_seconds, 0, k_day},
    Field{"prior_prefill_token_seconds", &C::prior_prefill_token_seconds, 0, k_day},
    Field{"prior_transfer_seconds", &C::prior_transfer_seconds, 0, k_day},
    Field{"prior_transfer_block_seconds", &C::prior_transfer_block_seconds, 0, k_day},
    Field{"index_max_bytes", &C::index_max_bytes, 0, k_many},
    Field{"retry_after_min_seconds", &C::retry_after_min_seconds, 0, k_day},
    Field{"retry_after_max_seconds", &C::retry_after_max_seconds, 0, k_day},
};

constexpr auto k_names = [] {
  std::array<std::string_view, k_fields.size()> names{};
  std::transform(k_fields.begin(), k_fields.end(), names.begin(), [](const Field& field) { return field.name; });
  return names;
}();

std::string number(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  if (!text.empty() && text.back() == '.') {
    text.pop_back();
  }
  return text;
}

const Field& find(std::string_view name) {
  for (const Field& field : k_fields) {
    if (field.name == name) {
      return field;
    }
  }
  std::string all;
  for (const std::string_view known : k_names) {
    all += (all.empty() ? "" : ", ") + std::string(known);
  }
  throw CoreError("unknown field " + std::string(name) + "; allowed: " + all);
}

}  // namespace

void AdmissionConfig::set(std::string_view name, double value) {
  const Field& field = find(name);
  const bool in_range = std::isfinite(value) && value >= field.least && value <= field.most;
  const bool integral = std::holds_alternative<std::int64_t C::*>(field.member);
  require(in_range && (!integral || value == std::floor(value)), [&] {
    return std::string(name) + "=" + number(value) + "; allowed: " + (integral ? "whole numbers " : "") +
           number(field.least) + " to " + number(field.most);
  });
  if (integral) {
    this->*std::get<std::int64_t C::*>(field.member) = static_cast<std::int64_t>(value);
  } else {
    this->*std::get<double C::*>(field.member) = value;
  }
}

double AdmissionConfig::get(std::string_view name) const {
  const Field& field = find(name);
  if (const auto* member = std::get_if<std::int64_t C::*>(&field.member)) {
    return static_cast<double>(this->**member);
  }
  return this->*std::get<double C::*>(field.member);
}

bool AdmissionConfig::whole(std::string_view name) {
  return std::holds_alternative<std::int64_t C::*>(find(name).member);
}

std::span<const std::string_view> AdmissionConfig::fields() noexcept {
  return k_names;
}

}  // namespace twinpool::admission
