// Runs a function once a frame, however often it is requested.

/** Longest wait for a frame, in ms. */
export const UNDRAWN_MS = 250;

export class NextFrame {
  private frame = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly run: () => void) {}

  /** Does it with the next frame. */
  request(): void {
    if (this.timer !== undefined) return;
    this.frame = requestAnimationFrame(this.now);
    // A tab that is hidden, or is being hidden, draws no frames, and must not gather what comes for hours.
    this.timer = setTimeout(this.now, UNDRAWN_MS);
  }

  /** Does it at once. */
  readonly now = (): void => {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.timer = undefined;
    this.run();
  };
}
