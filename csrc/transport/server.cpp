// SPDX-License-Identifier: Apache-2.0
#include "transport/server.h"

#include <grpc/slice.h>

#include <limits>
#include <utility>

namespace twinpool::transport {

namespace {

/// Calls that can arrive at once before the engine's thread must ask for more.
constexpr int kAwaited = 16;

}  // namespace

ServerCall::ServerCall(std::shared_ptr<Engine> engine, std::shared_ptr<Server> server)
    : Call(std::move(engine)),
      server_(std::move(server)),
      accept_(this, static_cast<void (Call::*)(bool)>(&ServerCall::on_accepted)),
      close_(this, static_cast<void (Call::*)(bool)>(&ServerCall::on_closed)),
      text_(grpc_empty_slice()) {
  grpc_call_details_init(&details_);
  grpc_metadata_array_init(&metadata_);
}

ServerCall::~ServerCall() {
  grpc_call_details_destroy(&details_);
  grpc_metadata_array_destroy(&metadata_);
  for (const grpc_metadata& entry : trailing_) {
    grpc_slice_unref(entry.key);
    grpc_slice_unref(entry.value);
  }
  grpc_slice_unref(text_);
}

double ServerCall::deadline() const {
  const gpr_timespec at = gpr_convert_clock_type(details_.deadline, GPR_CLOCK_MONOTONIC);
  if (gpr_time_cmp(at, gpr_inf_future(GPR_CLOCK_MONOTONIC)) >= 0) {
    return std::numeric_limits<double>::infinity();
  }
  return static_cast<double>(at.tv_sec) + at.tv_nsec * 1e-9;
}

uint64_t ServerCall::server_id() const {
  return server_->id();
}

void ServerCall::accept() {
  accept_.alive = shared_from_this();
  engine_->begin();
  grpc_completion_queue* queue = engine_->queue();
  if (grpc_server_request_call(server_->server_, &call_, &details_, &metadata_, queue, queue,
                               static_cast<Tag*>(&accept_)) != GRPC_CALL_OK) {
    accept_.alive.reset();
    engine_->undo();
  }
}

void ServerCall::on_accepted(bool ok) {
  if (!ok) {
    return;  // the server stops
  }
  server_->accept();
  const std::lock_guard lock(mutex_);
  many_ = server_->many_.contains(method());
  grpc_op op{};
  op.op = GRPC_OP_RECV_CLOSE_ON_SERVER;
  op.data.recv_close_on_server.cancelled = &cancelled_;
  start(close_, &op, 1);
  if (many_) {
    opened_ = true;
    engine_->post(Event::of(Event::Kind::opened, shared_from_this()));
  }
  read();
}

void ServerCall::received(grpc_byte_buffer* message) {
  if (many_) {
    Call::received(message);
    return;
  }
  // Its one message, or none: whoever serves it says what it thinks of that.
  read_all_ = true;
  opened_ = true;
  engine_->post(Event::of(Event::Kind::opened, shared_from_this(), message));
}

void ServerCall::on_closed(bool) {
  const std::lock_guard lock(mutex_);
  if (cancelled_ != 0 && !end_) {
    engine_->post(Event::of(Event::Kind::closed, shared_from_this()));
  }
}

bool ServerCall::add_end(grpc_op& op) {
  if (!end_) {
    return false;
  }
  for (const auto& [key, value] : end_->trailing) {
    grpc_metadata entry{};
    entry.key = grpc_slice_from_copied_buffer(key.data(), key.size());
    entry.value = grpc_slice_from_copied_buffer(value.data(), value.size());
    trailing_.push_back(entry);
  }
  text_ = grpc_slice_from_copied_buffer(end_->details.data(), end_->details.size());
  op.op = GRPC_OP_SEND_STATUS_FROM_SERVER;
  op.data.send_status_from_server.trailing_metadata = trailing_.data();
  op.data.send_status_from_server.trailing_metadata_count = trailing_.size();
  op.data.send_status_from_server.status = static_cast<grpc_status_code>(end_->code);
  op.data.send_status_from_server.status_details = &text_;
  return true;
}

Server::Server(std::shared_ptr<Engine> engine, const Arguments& arguments, FetchCertificates fetch)
    : engine_(std::move(engine)),
      id_(engine_->next_id()),
      fetch_(fetch ? std::make_shared<FetchCertificates>(std::move(fetch)) : nullptr) {
  std::vector<grpc_arg> args = grpc_args_of(arguments);
  const grpc_channel_args all{args.size(), args.data()};
  server_ = grpc_server_create(&all, nullptr);
  grpc_server_register_completion_queue(server_, engine_->queue(), nullptr);
}

/// Ends a server that nobody has stopped: gRPC demands that it is stopped before it goes.
struct Abandoned : Tag {
  Abandoned(grpc_server* given, std::shared_ptr<FetchCertificates> used)
      : server(given),
        fetch(std::move(used)) {}
  void complete(bool) override {
    grpc_server_destroy(server);
    delete this;
  }
  grpc_server* server;
  std::shared_ptr<FetchCertificates> fetch;
};

Server::~Server() {
  if (stopping_) {
    grpc_server_destroy(server_);
  } else if (!engine_->closing()) {
    auto* last = new Abandoned(server_, std::move(fetch_));
    engine_->begin();
    grpc_server_shutdown_and_notify(server_, engine_->queue(), static_cast<Tag*>(last));
    grpc_server_cancel_all_calls(server_);
  }
}

int Server::bind(const std::string& address) {
  grpc_server_credentials* credentials =
      fetch_ ? server_credentials(*fetch_) : grpc_insecure_server_credentials_create();
  const int port = grpc_server_add_http2_port(server_, address.c_str(), credentials);
  grpc_server_credentials_release(credentials);
  return port;
}

void Server::start(std::vector<std::string> many) {
  many_ = {many.begin(), many.end()};
  grpc_server_start(server_);
  started_ = true;
  for (int i = 0; i < kAwaited; ++i) {
    accept();
  }
}

void Server::accept() {
  if (!engine_->closing()) {
    std::make_shared<ServerCall>(engine_, shared_from_this())->accept();
  }
}

void Server::stop() {
  if (std::exchange(stopping_, true)) {
    return;
  }
  stopped_.alive = shared_from_this();
  engine_->begin();
  grpc_server_shutdown_and_notify(server_, engine_->queue(), static_cast<Tag*>(&stopped_));
}

void Server::cancel_all() {
  grpc_server_cancel_all_calls(server_);
}

void Server::Stopped::complete(bool) {
  owner->engine_->post(
      {.kind = Event::Kind::stopped, .call = nullptr, .message = nullptr, .status = {}, .server = owner->id_});
  alive.reset();
}

}  // namespace twinpool::transport
