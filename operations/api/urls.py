"""Routes of operations under `/api/`."""

from django.urls import path

from operations.api.audit import AuditView
from operations.api.history import ExportView, HistoryView, InboxView
from operations.api.jobs import DismissView, JobView, ModelJobView

urlpatterns = [
    path("audit", AuditView.as_view()),
    # Fixed paths before the routes with ids: an id never equals one of them.
    path("operations/history", HistoryView.as_view()),
    path("operations/history/export", ExportView.as_view()),
    path("operations/inbox", InboxView.as_view()),
    path("operations/<str:job_id>/dismiss", DismissView.as_view()),
    path("backends/job/<str:uid>", JobView.as_view()),
    path("models/job/<str:uid>", ModelJobView.as_view()),
]
