import assert from "node:assert/strict";
import { test } from "node:test";
import { formatRoute, parseRoute } from "./route";
import { requestKey } from "./transport";

test("a route survives being a link", () => {
  const route = { page: "tensor", params: { name: "a b/ü#?%&=.weight", state: "exp_avg" } };
  assert.deepEqual(parseRoute(formatRoute(route)), route);
});

test("a request has one key whatever the order of its parameters", () => {
  assert.equal(requestKey("tree", { step: 3, state: "a&b", side: undefined }), requestKey("tree", { state: "a&b", step: 3, side: "" }));
});
