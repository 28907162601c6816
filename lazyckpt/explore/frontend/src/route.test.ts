import assert from "node:assert/strict";
import { test } from "node:test";
import { arrival, formatRoute, parseRoute } from "./route";
import { FileTransport, requestKey } from "./transport";

test("a route survives being a link", () => {
  const route = { page: "tensor", params: { name: "a b/ü#?%&=.weight", state: "exp_avg" } };
  assert.deepEqual(parseRoute(formatRoute(route)), route);
});

test("a request has one key whatever the order of its parameters", () => {
  assert.equal(requestKey("tree", { step: 3, state: "a&b", side: undefined }), requestKey("tree", { state: "a&b", step: 3, side: "" }));
});

test("the name of a tensor may be empty", () => {
  const route = { page: "tensor", params: { name: "" } };
  assert.deepEqual(parseRoute(formatRoute(route)), route);
  assert.equal(requestKey("tensor", { name: "", state: "" }), "tensor?name=");
});

test("what UTF-8 has not survives being a link", () => {
  const route = { page: "tensor", params: { name: "a\ud800+ %ED%A0\udfff\u{1f600}=&" } };
  assert.deepEqual(parseRoute(formatRoute(route)), route);
  assert.equal(requestKey("tensor", { name: "\ud800" }), "tensor?name=%ED%A0%80");
  assert.equal(parseRoute("#/tree?name=%FF%").params["name"], "\ufffd%");
});

test("another name of a tied tensor has the answers of the tensor", async () => {
  const held = { answers: { "tile?name=embed": "H4sIAAAAAAAAA0sEAEO+t+gBAAAA" }, same: { "tile?name=head": "tile?name=embed" } };
  const file = new FileTransport(held);
  assert.deepEqual(["embed", "head", "toString"].map((name) => file.holds("tile", { name })), [true, true, false]);
  assert.equal(new TextDecoder().decode(await file.get("tile", { name: "head" })), "a");
});

test("a page comes back as it was left, but for what is of another tensor", () => {
  const left = { name: "a", state: "fp32", view: "0,1,0,1", how: "max", of: "update" };
  const bound = { view: ["name"], of: ["name", "state"] };
  assert.deepEqual(arrival(left, { name: "a", state: "fp32" }, {}, bound), left);
  assert.deepEqual(arrival(left, { name: "a" }, {}, bound), { name: "a", view: "0,1,0,1", how: "max" });
  assert.deepEqual(arrival(left, { name: "a", state: "fp32" }, { name: "b" }, bound), { name: "b", state: "fp32", how: "max" });
  assert.deepEqual(arrival(undefined, { name: "a" }, { state: "x" }, bound), { name: "a", state: "x" });
});
