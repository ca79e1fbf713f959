// Changes that a person requests: every button that changes something on the server uses `useAction`.
import { useMutation } from "@tanstack/react-query";
import { useCallback } from "react";
import { announce } from "../ui/announce";

/** A request to the server and its state. */
export interface Action<Input = void> {
  /** Sends the request. `then` follows a success and `failed` a failure unless the component is gone. */
  run: (input: Input, then?: () => void, failed?: (error: Error) => void) => void;
  busy: boolean;
  /** It has succeeded, and no request followed. */
  succeeded: boolean;
  error: Error | null;
  /** The last argument. */
  input: Input | undefined;
  forget: () => void;
}

const noop = () => undefined;

/** `done`: what assistive tech hears after a success, or what follows, also if the component is gone. */
export function useAction<Input = void, Output = unknown>(work: (input: Input) => Promise<Output>, done: string | ((output: Output, input: Input) => unknown) = noop): Action<Input> {
  const { mutate, isPending, isSuccess, error, variables, reset } = useMutation({
    mutationFn: work,
    // Without a network it fails where the eye is instead of happening by itself an hour later.
    networkMode: "always",
    // An answer may be a secret, such as a new key: it goes with its component.
    gcTime: 0,
    onSuccess: (output: Output, input: Input) => (typeof done === "string" ? announce(done) : done(output, input)),
  });
  const run = useCallback((input: Input, then: () => void = noop, failed: (error: Error) => void = noop) => mutate(input, { onSuccess: then, onError: failed }), [mutate]);
  return { run, busy: isPending, succeeded: isSuccess, error, input: variables, forget: reset };
}
