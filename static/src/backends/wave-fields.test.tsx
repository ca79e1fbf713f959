import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { useState, type ReactNode } from "react";
import { afterEach, describe, expect, it } from "vitest";
import { ONE_BY_ONE, waveProblem, waveProblems, WaveFields, wavesOf } from "./wave-fields";

afterEach(cleanup);

describe("the choice of waves (P10)", () => {
  it("is a number or a share of the nodes, a pause, and a number of failures", () => {
    expect(wavesOf(ONE_BY_ONE)).toEqual({ canary: true, max_unavailable: 1, pause_seconds: 0, stop_at_failures: 1 });
    const choice = { ...ONE_BY_ONE, canary: false, atOnce: " 25 % ", pauseMinutes: "1.5", stopAt: "3" };
    expect(waveProblem(choice)).toBe("");
    expect(wavesOf(choice)).toEqual({ canary: false, max_unavailable: "25%", pause_seconds: 90, stop_at_failures: 3 });
    expect(wavesOf({ ...choice, inWaves: false })).toBeNull();
  });

  it.each([
    ["atOnce", "0"],
    ["atOnce", "101%"],
    ["atOnce", "two"],
    ["pauseMinutes", "-1"],
    ["pauseMinutes", "x"],
    ["stopAt", "0"],
    ["stopAt", ""],
  ] as const)("says what is wrong: %s %s", (field, value) => {
    const choice = { ...ONE_BY_ONE, [field]: value };
    expect(waveProblems(choice)[field]).not.toBe("");
    expect(waveProblem(choice)).not.toBe("");
    expect(waveProblem({ ...choice, inWaves: false })).toBe("");
  });

  it("shows its fields only for waves", () => {
    function Form(): ReactNode {
      const [choice, setChoice] = useState(ONE_BY_ONE);
      return <WaveFields choice={choice} onChange={setChoice} inWaves="In waves" atOnce="All at once" />;
    }
    render(<Form />);
    fireEvent.change(screen.getByLabelText("Nodes at a time"), { target: { value: "x" } });
    expect(screen.getByRole("alert").textContent).toBe("Enter a number, or a percentage such as 25%.");
    fireEvent.click(screen.getByLabelText("All at once"));
    expect(screen.queryByLabelText("Nodes at a time")).toBeNull();
  });
});
