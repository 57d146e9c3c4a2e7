// SPDX-License-Identifier: Apache-2.0
#include "transport/call.h"

#include <grpc/byte_buffer.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>

#include <utility>

namespace twinpool::transport {

std::string text_of(const grpc_slice& slice) {
  return {reinterpret_cast<const char*>(GRPC_SLICE_START_PTR(slice)), GRPC_SLICE_LENGTH(slice)};
}

std::vector<Header> headers_of(const grpc_metadata_array& array) {
  std::vector<Header> headers;
  headers.reserve(array.count);
  for (size_t i = 0; i < array.count; ++i) {
    headers.emplace_back(text_of(array.metadata[i].key), text_of(array.metadata[i].value));
  }
  return headers;
}

void Call::Operation::complete(bool ok) {
  // Kept on the stack: `done` may start this operation again.
  const std::shared_ptr<Call> keep = std::move(alive);
  (owner->*done)(ok);
}

Call::Call(std::shared_ptr<Engine> engine)
    : engine_(std::move(engine)),
      id_(engine_->next_id()) {
  grpc_metadata_array_init(&initial_);
  engine_->add(this);
}

Call::~Call() {
  engine_->remove(this);
  for (const auto& [message, bytes] : outgoing_) {
    grpc_byte_buffer_destroy(message);
  }
  grpc_metadata_array_destroy(&initial_);
  if (call_ != nullptr) {
    grpc_call_unref(call_);
  }
}

bool Call::start(Operation& operation, const grpc_op* ops, size_t count) {
  if (engine_->closing()) {
    return false;
  }
  operation.alive = shared_from_this();
  engine_->begin();
  if (grpc_call_start_batch(call_, ops, count, static_cast<Tag*>(&operation), nullptr) != GRPC_CALL_OK) {
    operation.alive.reset();
    engine_->undo();
    return false;
  }
  return true;
}

void Call::send(std::vector<grpc_byte_buffer*> messages, std::optional<Status> end) {
  const std::lock_guard lock(mutex_);
  for (grpc_byte_buffer* message : messages) {
    if (ended_ || end_) {
      grpc_byte_buffer_destroy(message);
      continue;
    }
    // Noted here: sending takes the bytes out of their buffer.
    outgoing_.emplace_back(message, grpc_byte_buffer_length(message));
    waiting_bytes_ += outgoing_.back().second;
  }
  if (end && !end_) {
    end_ = std::move(end);
  }
  pump();
}

void Call::pump() {
  if (writing_ || ended_ || call_ == nullptr) {
    return;
  }
  grpc_op ops[3] = {};
  size_t count = 0;
  const bool greeting = !greeted_;
  if (greeting) {
    ops[count++].op = GRPC_OP_SEND_INITIAL_METADATA;
    // A client's call begins with its headers; a server's go with the first thing that it says.
    if (outgoing_.empty() && !end_ && !awaits_initial_metadata()) {
      return;
    }
  }
  carrying_ = !outgoing_.empty();
  if (carrying_) {
    grpc_op& op = ops[count++];
    op.op = GRPC_OP_SEND_MESSAGE;
    op.data.send_message.send_message = outgoing_.front().first;
    // What has more behind it is left to the system call of that. With the headers it would wait for it for ever.
    op.flags = outgoing_.size() > 1 && !greeting ? GRPC_WRITE_BUFFER_HINT : 0;
  }
  if (outgoing_.size() <= 1 && add_end(ops[count])) {
    ++count;
    ended_ = true;
  }
  if (count == 0) {
    return;
  }
  greeted_ = true;
  writing_ = start(write_, ops, count);
  ended_ = ended_ || !writing_;
}

void Call::on_write(bool ok) {
  const std::lock_guard lock(mutex_);
  writing_ = false;
  size_t done = carrying_ ? 1 : 0;
  if (!ok) {
    // The connection is gone or the call was cancelled: what waits will never be sent, and the end says so.
    done = outgoing_.size();
  }
  for (; done > 0; --done) {
    waiting_bytes_ -= outgoing_.front().second;
    grpc_byte_buffer_destroy(outgoing_.front().first);
    outgoing_.pop_front();
  }
  pump();
  if (wanted_ && waiting_bytes_ <= *wanted_) {
    wanted_.reset();
    engine_->post(Event::of(Event::Kind::writable, shared_from_this()));
  }
}

void Call::read() {
  if (reading_ || read_all_ || untaken_messages_ >= kUntakenMessages || untaken_bytes_ >= kUntakenBytes) {
    return;
  }
  grpc_op ops[2] = {};
  size_t count = 0;
  if (awaits_initial_metadata() && !heard_) {
    heard_ = true;
    ops[count].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[count++].data.recv_initial_metadata.recv_initial_metadata = &initial_;
  }
  ops[count].op = GRPC_OP_RECV_MESSAGE;
  ops[count++].data.recv_message.recv_message = &incoming_;
  reading_ = start(read_, ops, count);
}

void Call::on_read(bool ok) {
  const std::lock_guard lock(mutex_);
  reading_ = false;
  grpc_byte_buffer* message = std::exchange(incoming_, nullptr);
  if (!ok && message != nullptr) {
    grpc_byte_buffer_destroy(message);
    message = nullptr;
  }
  if (message == nullptr) {
    read_all_ = true;
  } else {
    ++untaken_messages_;
    untaken_bytes_ += grpc_byte_buffer_length(message);
  }
  received(message);
}

void Call::received(grpc_byte_buffer* message) {
  engine_->post(Event::of(Event::Kind::message, shared_from_this(), message));
  read();
}

void Call::taken(size_t bytes) {
  const std::lock_guard lock(mutex_);
  --untaken_messages_;
  untaken_bytes_ -= bytes;
  if (untaken_messages_ == 0) {
    read();
  }
}

bool Call::writable(size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (waiting_bytes_ <= bytes) {
    return true;
  }
  wanted_ = bytes;
  return false;
}

void Call::cancel(grpc_status_code code, const char* why) {
  grpc_call* call = nullptr;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    call = call_;
  }
  if (call != nullptr) {
    grpc_call_cancel_with_status(call, code, why, nullptr);
  }
}

std::string Call::peer() const {
  char* name = grpc_call_get_peer(call_);
  std::string copy(name);
  gpr_free(name);
  return copy;
}

std::vector<Header> Call::identity() const {
  std::vector<Header> shown;
  grpc_auth_context* context = grpc_call_auth_context(call_);
  if (context != nullptr) {
    grpc_auth_property_iterator iterator = grpc_auth_context_property_iterator(context);
    while (const grpc_auth_property* property = grpc_auth_property_iterator_next(&iterator)) {
      shown.emplace_back(property->name, std::string(property->value, property->value_length));
    }
    grpc_auth_context_release(context);
  }
  return shown;
}

}  // namespace twinpool::transport
