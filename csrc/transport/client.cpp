// SPDX-License-Identifier: Apache-2.0
#include "transport/client.h"

#include <grpc/slice.h>

#include <utility>

namespace twinpool::transport {

ClientCall::ClientCall(std::shared_ptr<Engine> engine, grpc_channel* channel, const std::string& method)
    : Call(std::move(engine)),
      close_(this, static_cast<void (Call::*)(bool)>(&ClientCall::on_closed)),
      text_(grpc_empty_slice()) {
  grpc_metadata_array_init(&trailing_);
  const grpc_slice path = grpc_slice_from_copied_buffer(method.data(), method.size());
  call_ = grpc_channel_create_call(channel, nullptr, GRPC_PROPAGATE_DEFAULTS, engine_->queue(), path, nullptr,
                                   gpr_inf_future(GPR_CLOCK_REALTIME), nullptr);
  grpc_slice_unref(path);
}

ClientCall::~ClientCall() {
  grpc_metadata_array_destroy(&trailing_);
  grpc_slice_unref(text_);
}

void ClientCall::open() {
  const std::lock_guard lock(mutex_);
  grpc_op op{};
  op.op = GRPC_OP_RECV_STATUS_ON_CLIENT;
  op.data.recv_status_on_client.trailing_metadata = &trailing_;
  op.data.recv_status_on_client.status = &code_;
  op.data.recv_status_on_client.status_details = &text_;
  start(close_, &op, 1);
  pump();
  read();
}

void ClientCall::on_closed(bool) {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  Status status{static_cast<int>(code_), text_of(text_), headers_of(trailing_)};
  engine_->post(
      {.kind = Event::Kind::closed, .call = shared_from_this(), .message = nullptr, .status = std::move(status)});
}

Channel::Channel(std::shared_ptr<Engine> engine, const std::string& target, const Arguments& arguments,
                 const std::optional<Certificates>& certificates)
    : engine_(std::move(engine)) {
  std::vector<grpc_arg> args = grpc_args_of(arguments);
  const grpc_channel_args all{args.size(), args.data()};
  grpc_channel_credentials* credentials =
      certificates ? channel_credentials(*certificates) : grpc_insecure_credentials_create();
  channel_ = grpc_channel_create(target.c_str(), credentials, &all);
  grpc_channel_credentials_release(credentials);
}

Channel::~Channel() {
  grpc_channel_destroy(channel_);
}

std::shared_ptr<ClientCall> Channel::stream(const std::string& method) {
  auto call = std::make_shared<ClientCall>(engine_, channel_, method);
  call->open();
  return call;
}

}  // namespace twinpool::transport
