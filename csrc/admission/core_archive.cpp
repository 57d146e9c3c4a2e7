// SPDX-License-Identifier: Apache-2.0
// Saving and loading of a whole router core.
#include "admission/router_core.h"
#include "placement/archive.h"

namespace twinpool::admission {

namespace {

template <typename S>
constexpr bool has_fields = requires(S& state, Writer& writer) { state.archive(writer); };

template <typename A, typename S>
void archive_fields(A& a, S& state) {
  if constexpr (has_fields<S>) {
    a(state);
  }
}

void archive_state(Writer& a, State& state) {
  a(static_cast<std::uint8_t>(state.index()));
  std::visit([&](auto& current) { archive_fields(a, current); }, state);
}

template <std::size_t... I>
void make_state(Reader& a, State& state, std::size_t index, std::index_sequence<I...> /*all*/) {
  // NOLINTNEXTLINE(readability-redundant-lambda-parameter-list): C++20 asks for it
  const auto make = [&]<std::size_t N>() {
    if (index == N) {
      archive_fields(a, state.emplace<N>());
    }
  };
  (make.template operator()<I>(), ...);
}

void archive_state(Reader& a, State& state) {
  std::uint8_t index = 0;
  a(index);
  require(index < std::variant_size_v<State>, "archive: state");
  make_state(a, state, index, std::make_index_sequence<std::variant_size_v<State>>());
}

template <typename A>
void archive_request(A& a, Request& r) {
  a(r.id, r.request_id, r.adapter, r.pool, r.tenant, r.prompt_tokens, r.max_new_tokens, r.choices, r.bytes, r.priority,
    r.preemptible, r.arrival, r.deadline, r.hashes, r.prefer);
  archive_state(a, r.state);
  a(r.attempt, r.failures, r.resumes, r.refusals, r.output_tokens, r.delivered, r.avoid, r.return_at, r.queued_at,
    r.queue_until, r.timer_at, r.bypassed, r.blocked_version, r.blocked_until, r.decision, r.placed, r.placed_at,
    r.computing_since, r.predicted_first, r.predicted_token, r.clean_sample, r.charged, r.bucket_tokens);
}

}  // namespace

template <typename A>
void RouterCore::archive(A& a) {
  a(index_, workers_, placer_, tenants_);
  std::uint64_t pools = pools_.size();
  a(pools);
  for (std::uint64_t id = 0; id < pools; ++id) {
    if constexpr (A::reading) {
      pools_.push_back(std::make_unique<Pool>(static_cast<std::uint32_t>(id), config_));
    }
    a(*pools_[id]);
  }
  a(timers_, in_state_, refused_, next_request_, sequence_, bypassed_, preempted_, by_request_id_);
}

void RouterCore::save(std::string& out) {
  Writer writer(out);
  archive(writer);
  writer(static_cast<std::uint64_t>(requests_.size()));
  for (auto& [id, request] : requests_) {
    archive_request(writer, request);
  }
}

void RouterCore::load(std::span<const char> in) {
  require(requests_.empty() && workers_.slots() == 0, "load: the core is in use");
  Reader reader(in);
  archive(reader);
  std::uint64_t requests = 0;
  reader(requests);
  require(requests <= reader.left(), "archive: truncated");
  for (; requests > 0; --requests) {
    Request request;
    archive_request(reader, request);
    require(request.pool < pools_.size(), "archive: pool");
    const std::uint64_t id = request.id;
    attach(requests_.emplace(id, std::move(request)).first->second);
  }
  require(reader.at_end(), "archive: bytes are left over");
}

// The tables hold all amounts already; the handles only have to know them again.
void RouterCore::attach(Request& request) {
  std::visit(
      [&]<typename S>(S& state) {
        if constexpr (requires { state.tenant; }) {
          state.tenant.attach(tenants_);
        }
        if constexpr (requires { state.place; }) {
          state.place.attach(pool_of(request).queue);
        }
        if constexpr (requires { state.work; }) {
          state.work.attach(workers_);
        }
        if constexpr (requires { state.transfer; }) {
          state.transfer.attach(workers_);
        }
        if constexpr (requires { state.blocks; }) {
          state.blocks.attach(workers_);
        }
      },
      request.state);
}

}  // namespace twinpool::admission
