import { describe, expect, it } from "vitest";
import { ApiError, explain } from "../api/client";
import { problems, refused } from "./password-rules";

describe("the rules that the browser checks", () => {
  it("names everything that is wrong at once", () => {
    expect(problems({ old: "", next: "1234567", repeat: "other" })).toEqual({
      old: ["Enter your current password."],
      next: ["Use at least 8 characters.", "Use at least one character that is not a digit."],
      repeat: ["Passwords do not match."],
    });
  });

  it("accepts a good password", () => {
    expect(problems({ old: "before", next: "a whole sentence", repeat: "a whole sentence" })).toEqual({});
  });

  it("refuses the current password as the new one", () => {
    const same = { old: "a whole sentence", next: "a whole sentence", repeat: "a whole sentence" };
    expect(problems(same)).toEqual({ next: ["The new password must differ from the current one."] });
  });
});

describe("the server's answer", () => {
  const response = { status: 400, headers: new Headers() };

  it("is shown at its fields", () => {
    const fields = { old: ["Current password is incorrect."], new: ["This password is too common."] };
    const error = explain({ error: "both", field: "old", fields }, response);
    expect(refused(error)).toEqual({ old: fields.old, next: fields.new });
  });

  it("of a malformed value names its one field", () => {
    expect(refused(explain({ error: "new: null", field: "new" }, response))).toEqual({ next: ["new: null"] });
  });

  it("without a field belongs to none", () => {
    expect(refused(new ApiError("The server is unreachable.", 0))).toEqual({});
  });
});
