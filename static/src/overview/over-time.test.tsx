import { cleanup, render, screen } from "@testing-library/react";
import { afterEach, expect, it, vi } from "vitest";
import { Charts } from "./charts";
import type { Figures } from "./data";

const answer = vi.hoisted(() => ({ figures: [] as Figures["figures"] }));
// Needs a canvas.
vi.mock("../ui/chart", () => ({ Chart: ({ title }: { title: string }) => <figure aria-label={title} />, ChartPlaceholder: () => null }));
vi.mock("./data", async (original) => ({
  ...(await original<typeof import("./data")>()),
  useFigures: () => ({ data: { scope: "model", name: "tiny", from: "2026-08-22T10:00:00Z", step: 10, figures: answer.figures, events: [] }, isPending: false, error: null }),
}));
vi.mock("../live/hooks", () => ({ useLive: () => 0 }));
vi.mock("../lib/in-address", () => ({ useInAddress: () => ["hour", () => undefined] }));

afterEach(cleanup);

function chartTitles(figures: readonly (readonly [name: Figures["figures"][number]["name"], values: (number | null)[]])[]): (string | null)[] {
  answer.figures = figures.map(([name, values]) => ({ name, gpu: null, unit: "requests", values }));
  render(<Charts model="tiny" />);
  return screen.queryAllByRole("figure").map((chart) => chart.getAttribute("aria-label"));
}

it("names the charts without values and the reason, and draws no frame for them", () => {
  expect(chartTitles([["requests", [0, 0]], ["completion_tokens", [0, 0]], ["errors", [0, 0]], ["first_token", [null, null]]])).toEqual(["Requests", "Output tokens", "Errors"]);
  expect(screen.getByText("Time to first token: no request returned a token in this period.")).toBeTruthy();
});

it("says that nothing is kept of a period", () => {
  expect(chartTitles([["requests", [null]]])).toEqual([]);
  expect(screen.getByText("Requests, Output tokens, Errors, Time to first token: the server has kept no figures of this period.")).toBeTruthy();
});
