// How a machine joins: the exact command, with this controller's address in it.
import type { ReactNode } from "react";
import { Command } from "../../ui/copy";

/** The worker's start; capitals are what only the operator knows. */
export function command(place: Pick<Location, "origin" | "hostname">): string {
  return [
    `LOCALAI_REGISTER_TO=${place.origin}`,
    `LOCALAI_NATS_URL=nats://USER:PASSWORD@${place.hostname}:4222`,
    "LOCALAI_REGISTRATION_TOKEN=TOKEN",
    "localai-cluster-worker",
  ].join(" \\\n  ");
}

export function AddWorker({ id }: { id: string }): ReactNode {
  return (
    <section id={id} className="add-worker stack" aria-label="Add a worker">
      <h2>Add a worker</h2>
      <p>On another machine (replace the upper-case placeholders with the controller’s NATS credentials and registration token):</p>
      <Command text={command(window.location)} />
      <p>On this machine, alongside a cluster started with <code>make run</code>:</p>
      <Command text="make worker NAME=two" />
      <p className="muted">The worker appears here as pending, with the fingerprint shown in its log. Approve it to send it work.</p>
    </section>
  );
}
