// An error where the eye is: what happened, what can be done, the request's id to quote, and a way to try again.
import type { ReactNode } from "react";
import { advice, ApiError } from "../api/client";
import { Button } from "./button";
import { CopyButton } from "./copy";

export function Problem({ error, onRetry, onDismiss }: { error: Error; onRetry?: () => void; onDismiss?: () => void }): ReactNode {
  const apiError = error instanceof ApiError ? error : null;
  const adviceText = apiError === null ? "" : advice(apiError);
  return (
    <div className="problem" role="alert">
      <span className="grow">
        <strong>{error.message}</strong>
        {adviceText !== "" && <> {adviceText}</>}
      </span>
      {apiError !== null && apiError.requestId !== "" && (
        <CopyButton small text={`${error.message} (request ${apiError.requestId})`} label="Copy error" />
      )}
      {onRetry !== undefined && (
        <Button small onClick={onRetry}>
          Try again
        </Button>
      )}
      {onDismiss !== undefined && (
        <Button small onClick={onDismiss}>
          Close
        </Button>
      )}
    </div>
  );
}
