// Functions to call when something changes.
export class Listeners<Told extends unknown[] = []> {
  private readonly listeners = new Set<(...told: Told) => void>();

  /** Calls `listener` at each `notify`; returns how to stop that. */
  readonly subscribe = (listener: (...told: Told) => void): (() => void) => {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  };

  readonly notify = (...told: Told): void => {
    for (const listener of this.listeners) listener(...told);
  };
}
