// SPDX-License-Identifier: Apache-2.0
// Streams to other processes.
#pragma once

#include <grpc/grpc.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/call.h"
#include "transport/options.h"

namespace twinpool::transport {

/// A call of ours whose both sides may send many messages. It ends with a `closed` event, after all messages.
class ClientCall : public Call {
 public:
  ClientCall(std::shared_ptr<Engine> engine, grpc_channel* channel, const std::string& method);
  ~ClientCall() override;
  /// Once, right after it was made.
  void open();

 private:
  void on_closed(bool ok);
  bool add_end(grpc_op&) override { return false; }
  bool awaits_initial_metadata() const override { return true; }

  Operation close_;
  grpc_metadata_array trailing_;
  grpc_status_code code_ = GRPC_STATUS_UNKNOWN;
  grpc_slice text_;
};

/// A channel to one address. Connects on first use.
class Channel {
 public:
  Channel(std::shared_ptr<Engine> engine, const std::string& target, const Arguments& arguments,
          const std::optional<Certificates>& certificates);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  std::shared_ptr<ClientCall> stream(const std::string& method);

 private:
  std::shared_ptr<Engine> engine_;
  grpc_channel* channel_;
};

}  // namespace twinpool::transport
