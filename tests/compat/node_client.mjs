// SPDX-License-Identifier: Apache-2.0
// A client in JavaScript, made of the proto files alone: node node_client.mjs PROTO_DIRECTORY HOST:PORT
import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(process.cwd(), "index.js"));
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [directory, address] = process.argv.slice(2);
const files = ["inference.proto", "chat.proto"].map((name) => path.join(directory, "twinpool/v1", name));
const definition = loader.loadSync(files, { includeDirs: [directory], keepCase: true, longs: Number, enums: String, oneofs: true });
const { twinpool } = grpc.loadPackageDefinition(definition);
const credentials = grpc.credentials.createInsecure();
const inference = new twinpool.v1.InferenceService(address, credentials);
const chats = new twinpool.v1.ChatService(address, credentials);

const collect = (stream) =>
  new Promise((resolve, reject) => {
    const events = [];
    stream.on("data", (event) => events.push(event));
    stream.on("end", () => resolve(events));
    stream.on("error", reject);
  });

const answer = await collect(inference.Generate({ text: "hello", stop: { max_tokens: 20 } }));
const tools = [{ name: "weather", description: "What the weather is.", parameters_json: '{"type": "object"}' }];
const chat = { messages: [{ role: "user", content: "Rain in Bern?" }], tools };
const turn = await collect(chats.Chat({ request: { chat, stop: { max_tokens: 200 } } }));
const calls = turn.flatMap((event) => event.delta?.tool_calls ?? []);
const refused = await collect(inference.Generate({ text: "" })).catch((error) => error);

console.log(
  JSON.stringify({
    text: answer.map((event) => event.tokens?.text ?? "").join(""),
    finish: answer.at(-1).finished.choices[0].reason,
    name: calls[0].name,
    arguments: calls.map((call) => call.arguments_json).join(""),
    turn: turn.at(-1).finished.choices[0].reason,
    refused: refused.code === grpc.status.INVALID_ARGUMENT,
  }),
);
process.exit(0);
