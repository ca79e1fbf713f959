import { cleanup, screen } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, expect, it } from "vitest";
import { GIB, model, node, show } from "../../live/fixtures";
import type { LiveNode } from "../../live/messages";
import { stage } from "../../live/stage";
import { LiveStore } from "../../live/store";
import { Gpus } from "./gpus";
import { Slots, slotRows } from "./slots";

afterEach(cleanup);

const models = [model("b", 1, { state: "unloading", vram_needed: GIB }), model("b", 0, { vram_needed: 2 * GIB }), model("a", 0, { state: "loading", vram_needed: 4 * GIB })];

it("a row in any state takes a slot; loads under way hold what they need (UI-4.17)", () => {
  expect(slotRows({ models, max_replicas_per_model: 2 })).toEqual([
    { model: "a", used: 1, most: 2, free: 1, loading: 4 * GIB, estimated: 0 },
    { model: "b", used: 2, most: 2, free: 0, loading: 0, estimated: 3 * GIB },
  ]);
  expect(slotRows({ models, max_replicas_per_model: 1 })[1]?.free).toBe(0);
});

it("shows slots, reservations and each GPU (UI-4.17, UW14)", async () => {
  const gpus = [{ index: 0, uuid: "GPU-1", name: "NVIDIA L4", total_vram: 24 * GIB, free_vram: 20 * GIB, utilization: 40, reserved_vram: 2 * GIB, temperature: 62, power: 72, power_limit: 75, ecc_errors: 3 }];
  const shownNode = node("n", { models, reserved_vram: 2 * GIB, ...({ gpus } as Partial<LiveNode>) });
  stage(show(new LiveStore(), shownNode), createMemoryRouter([{ path: "*", element: <><Slots node={shownNode} /><Gpus node={shownNode} /></> }]));
  expect((await screen.findByRole("row", { name: /^a/ })).textContent).toBe("a1 of 214 GiB–");
  expect(screen.getByText("2 GiB reserved since the last reading")).toBeTruthy();
  expect(screen.getByRole("img", { name: "VRAM of GPU 0: 4 GiB of 24 GiB, 2 GiB reserved" })).toBeTruthy();
  expect(screen.getByText("40% busy, 62 °C, 72 of 75 W")).toBeTruthy();
  expect(screen.getByText("3 uncorrected memory errors")).toBeTruthy();
});
