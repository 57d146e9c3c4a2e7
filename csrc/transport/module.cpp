// SPDX-License-Identifier: Apache-2.0
// The Python module. Every call into gRPC is made without the interpreter's lock, which fetching certificates may need.
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <stdexcept>

#include "transport/client.h"
#include "transport/server.h"

namespace py = pybind11;

namespace twinpool::transport {

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

bool is_binary(const std::string& key) {
  return key.ends_with("-bin");
}

py::tuple py_headers(const std::vector<Header>& headers) {
  py::tuple out(headers.size());
  for (size_t i = 0; i < headers.size(); ++i) {
    const auto& [key, value] = headers[i];
    py::object shown = is_binary(key) ? py::object(py::bytes(value))
                                      : py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
                                            value.data(), static_cast<Py_ssize_t>(value.size()), "replace"));
    out[i] = py::make_tuple(py::str(key), std::move(shown));
  }
  return out;
}

/// Copies the message once, into the object that Python gets: bytes, or the number of a compression and what it has
/// made.
py::object py_message(grpc_byte_buffer* message) {
  if (message == nullptr) {
    return py::none();
  }
  grpc_byte_buffer_reader reader;
  if (grpc_byte_buffer_reader_init(&reader, message) == 0) {
    return py::none();
  }
  PyObject* out =
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(grpc_byte_buffer_length(reader.buffer_out)));
  if (out == nullptr) {
    grpc_byte_buffer_reader_destroy(&reader);
    throw py::error_already_set();
  }
  char* to = PyBytes_AS_STRING(out);
  grpc_slice* slice = nullptr;
  while (grpc_byte_buffer_reader_peek(&reader, &slice) != 0) {
    memcpy(to, GRPC_SLICE_START_PTR(*slice), GRPC_SLICE_LENGTH(*slice));
    to += GRPC_SLICE_LENGTH(*slice);
  }
  grpc_byte_buffer_reader_destroy(&reader);
  auto bytes = py::reinterpret_steal<py::object>(out);
  const auto compression = static_cast<int>(message->data.raw.compression);
  return compression == GRPC_COMPRESS_NONE ? bytes : py::object(py::make_tuple(compression, std::move(bytes)));
}

py::tuple py_event(const Event& event, py::object message) {
  const int kind = static_cast<int>(event.kind);
  switch (event.kind) {
  case Event::Kind::opened: {
    const auto call = std::static_pointer_cast<ServerCall>(event.call);
    return py::make_tuple(kind, call->id(), call, call->method(), py_headers(call->metadata()), call->deadline(),
                          std::move(message), call->server_id());
  }
  case Event::Kind::message:
    return py::make_tuple(kind, event.call->id(), std::move(message));
  case Event::Kind::closed:
    return py::make_tuple(kind, event.call->id(), event.status.code, py::bytes(event.status.details),
                          py_headers(event.status.trailing));
  case Event::Kind::writable:
    return py::make_tuple(kind, event.call->id());
  case Event::Kind::stopped:
    return py::make_tuple(kind, event.server);
  }
  throw std::logic_error("an event of no kind");
}

py::list take(Engine& engine) {
  std::vector<Event> events = engine.take();
  py::list out(events.size());
  std::vector<std::pair<std::shared_ptr<Call>, size_t>> taken;
  for (size_t i = 0; i < events.size(); ++i) {
    Event& event = events[i];
    py::object message = py_message(event.message);
    if (event.message != nullptr) {
      taken.emplace_back(event.call, grpc_byte_buffer_length(event.message));
    }
    out[i] = py_event(event, std::move(message));
  }
  const py::gil_scoped_release unlocked;
  for (Event& event : events) {
    if (event.message != nullptr) {
      grpc_byte_buffer_destroy(event.message);
    }
  }
  for (const auto& [call, bytes] : taken) {
    call->taken(bytes);
  }
  taken.clear();
  events.clear();
  return out;
}

struct Sending {
  std::shared_ptr<Call> call;
  std::vector<grpc_byte_buffer*> messages;
  std::optional<Status> end;
};

std::vector<Header> headers_from(const py::handle& given) {
  std::vector<Header> headers;
  for (const py::handle entry : given) {
    const auto pair = py::reinterpret_borrow<py::tuple>(entry);
    headers.emplace_back(pair[0].cast<std::string>(), pair[1].cast<std::string>());
  }
  return headers;
}

Sending sending_from(const py::tuple& entry) {
  Sending out{.call = entry[0].cast<std::shared_ptr<Call>>(), .messages = {}, .end = {}};
  for (const py::handle message : py::reinterpret_borrow<py::list>(entry[1])) {
    char* bytes = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(message.ptr(), &bytes, &size) != 0) {
      throw py::error_already_set();
    }
    grpc_slice slice = grpc_slice_from_copied_buffer(bytes, static_cast<size_t>(size));
    out.messages.push_back(grpc_raw_byte_buffer_create(&slice, 1));
    grpc_slice_unref(slice);
  }
  if (!entry[2].is_none()) {
    const auto end = entry[2].cast<py::tuple>();
    out.end = Status{end[0].cast<int>(), end[1].cast<std::string>(), headers_from(end[2])};
  }
  return out;
}

void send(const py::list& entries) {
  std::vector<Sending> all;
  all.reserve(entries.size());
  for (const py::handle entry : entries) {
    all.push_back(sending_from(py::reinterpret_borrow<py::tuple>(entry)));
  }
  const py::gil_scoped_release unlocked;
  for (Sending& each : all) {
    each.call->send(std::move(each.messages), std::move(each.end));
  }
  all.clear();
}

py::dict identity(const Call& call) {
  py::dict out;
  for (const auto& [name, value] : call.identity()) {
    if (!out.contains(name)) {
      out[py::str(name)] = py::list();
    }
    py::reinterpret_borrow<py::list>(out[py::str(name)]).append(py::bytes(value));
  }
  return out;
}

}  // namespace

PYBIND11_MODULE(_transport, m) {
  m.doc() = "gRPC's C core for the router's data path: bytes in batches, no protobuf.";
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([] {
        auto engine = std::make_shared<Engine>();
        engine->start();
        return engine;
      }))
      .def_property_readonly("wakeup_fd", &Engine::wakeup_fd)
      .def("take", &take)
      .def("close", &Engine::close, Unlocked());
  py::class_<Certificates>(m, "Certificates")
      .def(py::init([](std::string roots, std::string key, std::string chain) {
             return Certificates{std::move(roots), std::move(key), std::move(chain)};
           }),
           py::kw_only(), py::arg("roots"), py::arg("key"), py::arg("chain"));
  py::class_<Call, std::shared_ptr<Call>>(m, "Call")
      .def("writable", &Call::writable, Unlocked(), py::arg("bytes"))
      .def_property_readonly("waiting_bytes", &Call::waiting_bytes)
      .def(
          "cancel", [](Call& call) { call.cancel(GRPC_STATUS_CANCELLED, "Cancelled"); }, Unlocked())
      .def("peer", &Call::peer)
      .def("identity", &identity);
  py::class_<ServerCall, Call, std::shared_ptr<ServerCall>>(m, "ServerCall");
  py::class_<ClientCall, Call, std::shared_ptr<ClientCall>>(m, "ClientCall")
      .def_property_readonly("id", &ClientCall::id);
  py::class_<Server, std::shared_ptr<Server>>(m, "Server")
      .def(py::init<std::shared_ptr<Engine>, const Arguments&, FetchCertificates>(), py::arg("engine"),
           py::arg("options"), py::arg("fetch") = nullptr)
      .def_property_readonly("id", &Server::id)
      .def("bind", &Server::bind, Unlocked(), py::arg("address"))
      .def("start", &Server::start, Unlocked(), py::arg("many"))
      .def("stop", &Server::stop, Unlocked())
      .def("cancel_all", &Server::cancel_all, Unlocked());
  py::class_<Channel>(m, "Channel")
      .def(
          py::init<std::shared_ptr<Engine>, const std::string&, const Arguments&, const std::optional<Certificates>&>(),
          py::arg("engine"), py::arg("target"), py::arg("options"), py::arg("certificates") = std::nullopt)
      .def("stream", &Channel::stream, Unlocked(), py::arg("method"));
  m.def("send", &send, py::arg("entries"));
  m.def("core_version", &grpc_version_string);
}

}  // namespace twinpool::transport
