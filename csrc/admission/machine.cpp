// SPDX-License-Identifier: Apache-2.0
#include "admission/machine.h"

namespace twinpool::admission {

namespace {

constexpr std::size_t k_own_events = 5;  // the first of AllEvents

template <typename Result>
struct Targets {
  static std::string text() { return std::string(Result::name); }
};
template <>
struct Targets<Ignored> {
  static std::string text() { return "ignored"; }
};
template <typename First, typename... Rest>
struct Targets<std::variant<First, Rest...>> {
  static std::string text() { return (std::string(First::name) + ... + (" or " + std::string(Rest::name))); }
};

template <typename Event, typename S>
TransitionRow row() {
  if constexpr (std::is_invocable_v<Event&, S&&>) {
    return {Event::name, S::name, Targets<std::invoke_result_t<Event&, S&&>>::text()};
  } else {
    return {Event::name, S::name, "error"};
  }
}

template <typename Event, typename... States>
void rows(std::vector<TransitionRow>& table, const std::variant<States...>* /*list*/) {
  (table.push_back(row<Event, States>()), ...);
}

template <typename... Events>
std::vector<TransitionRow> all_rows(EventList<Events...> /*list*/) {
  std::vector<TransitionRow> table;
  (rows<Events>(table, static_cast<const State*>(nullptr)), ...);
  return table;
}

template <typename... States>
std::vector<std::string_view> names(const std::variant<States...>* /*list*/) {
  return {States::name...};
}

template <typename... Events>
std::vector<std::string_view> names(EventList<Events...> /*list*/) {
  return {Events::name...};
}

}  // namespace

void illegal_event(std::string_view event, std::string_view state) {
  throw CoreError("event=" + std::string(event) + "; state=" + std::string(state));
}

std::string_view name_of(const State& state) {
  return std::visit([]<typename S>(const S&) { return S::name; }, state);
}

bool terminal(const State& state) {
  return std::visit([]<typename S>(const S&) { return is_terminal<S>; }, state);
}

Cause cause_of(const State& state) {
  return std::visit(
      []<typename S>(const S& s) {
        if constexpr (requires { s.cause; }) {
          return s.cause;
        }
        return Cause::none;
      },
      state);
}

std::vector<TransitionRow> transition_table() {
  return all_rows(AllEvents{});
}

std::vector<std::string_view> state_names() {
  return names(static_cast<const State*>(nullptr));
}

std::vector<std::string_view> event_names() {
  std::vector<std::string_view> all = names(AllEvents{});
  all.erase(all.begin(), all.begin() + k_own_events);
  return all;
}

}  // namespace twinpool::admission
