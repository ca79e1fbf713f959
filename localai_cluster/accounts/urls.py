"""Routes of signing in, under `/api/auth/`."""

from django.urls import path

from localai_cluster.accounts import session_views

urlpatterns = [
    path("status", session_views.StatusView.as_view()),
    path("login", session_views.LoginView.as_view()),
    path("logout", session_views.LogoutView.as_view()),
    path("password", session_views.PasswordView.as_view()),
]
