import assert from "node:assert/strict";
import { test } from "node:test";
import { age, count, counted, rate, seconds, share, shortId, tenantName } from "../src/format.ts";

test("counts are exact below ten million", () => {
  assert.equal(count(0), "0");
  assert.equal(count(1234), "1,234");
  assert.equal(count(9_999_999), "9,999,999");
  assert.equal(count(12_345_678), "12.3 M");
  assert.equal(count(2_500_000_000), "2.50 G");
  assert.equal(count(null), "–");
  assert.equal(count(undefined), "–");
});

test("nouns follow their number", () => {
  assert.equal(counted(1, "block"), "1 block");
  assert.equal(counted(0, "block"), "0 blocks");
  assert.equal(counted(2, "branch", "branches"), "2 branches");
});

test("rates below 1,000 have at most three significant digits", () => {
  assert.equal(rate(0), "0");
  assert.equal(rate(0.01234), "0.012");
  assert.equal(rate(12.34), "12.3");
  assert.equal(rate(999.6), "1,000");
  assert.equal(rate(1234.4), "1,234");
});

test("a duration that rounds up to the next unit is shown in that unit", () => {
  const shown: [number, string][] = [
    [0, "0 s"],
    [0.0000004, "0 µs"],
    [0.00084, "840 µs"],
    [0.0009994, "999 µs"],
    [0.0009996, "1.00 ms"],
    [0.0123, "12.3 ms"],
    [0.1234, "123 ms"],
    [0.99949, "999 ms"],
    [0.9996, "1.00 s"],
    [1.254, "1.25 s"],
    [12.34, "12.3 s"],
    [59.94, "59.9 s"],
    [59.96, "1 min 0 s"],
    [185, "3 min 5 s"],
    [7440, "2 h 4 min"],
  ];
  for (const [value, text] of shown) assert.equal(seconds(value), text, String(value));
  assert.equal(seconds(null), "–");
});

test("ages are whole seconds", () => {
  assert.equal(age(3.9), "3 s");
  assert.equal(age(-0.2), "0 s");
  assert.equal(age(61), "1 min 1 s");
  assert.equal(age(null), "–");
});

test("100% means all, and 0% means nothing", () => {
  assert.equal(share(1, 0), "–");
  assert.equal(share(0, 10), "0%");
  assert.equal(share(10, 10), "100%");
  assert.equal(share(9999, 10_000), "99.9%");
  assert.equal(share(1, 1_000_000), "0.1%");
  assert.equal(share(423, 1000), "42%");
});

test("ids keep their beginning and end", () => {
  assert.equal(shortId("short"), "short");
  assert.equal(shortId("0123456789abcdef0123456789abcdef").length, 22);
  assert.match(shortId("0123456789abcdef0123456789abcdef"), /^0123.*…abcdef$/);
  assert.equal(tenantName(""), "(none)");
});
