// SPDX-License-Identifier: Apache-2.0
// Applies events to states, and reads the transition table off the event types.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "admission/events.h"
#include "core/error.h"

namespace twinpool::admission {

[[noreturn]] void illegal_event(std::string_view event, std::string_view state);

/// Applies the event in place. False: the event is late and nothing happened. Throws CoreError ``event=X; state=Y``,
/// with nothing changed, where the event is not legal.
template <typename Event>
bool apply(State& state, Event&& event) {
  return std::visit(
      [&]<typename S>(S& current) -> bool {
        if constexpr (!std::is_invocable_v<Event&, S&&>) {
          illegal_event(std::remove_cvref_t<Event>::name, S::name);
        } else {
          using Result = std::invoke_result_t<Event&, S&&>;
          if constexpr (std::is_same_v<Result, Ignored>) {
            return false;
          } else if constexpr (std::is_constructible_v<State, Result>) {
            state = State(event(std::move(current)));
            return true;
          } else {
            Result result = event(std::move(current));
            std::visit([&](auto&& target) { state = State(std::forward<decltype(target)>(target)); },
                       std::move(result));
            return true;
          }
        }
      },
      state);
}

std::string_view name_of(const State& state);
bool terminal(const State& state);
/// Of a terminal state, and of Retrying; otherwise none.
Cause cause_of(const State& state);

/// One cell of the table: a state name, several joined by " or ", "ignored" or "error".
struct TransitionRow {
  std::string_view event;
  std::string_view state;
  std::string result;
};
std::vector<TransitionRow> transition_table();
std::vector<std::string_view> state_names();
/// Those that ``RouterCore::advance`` takes.
std::vector<std::string_view> event_names();

}  // namespace twinpool::admission
