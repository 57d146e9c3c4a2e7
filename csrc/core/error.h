// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

namespace twinpool {

/// A caller broke a rule of the core. The message names the rule; whoever throws it has changed nothing.
class CoreError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws CoreError(message) unless the rule holds. The message is built only on failure when passed as a callable.
template <typename Message>
inline void require(bool holds, Message&& message) {
  if (holds) [[likely]] {
    return;
  }
  if constexpr (requires { std::string(message()); }) {
    throw CoreError(std::string(message()));
  } else {
    throw CoreError(std::string(message));
  }
}

}  // namespace twinpool
